"""Tennis: game by game, best of three sets, with breaks, tie-breaks and the time it took."""

from random import Random
from typing import Any

from sportsllm.simulator.grammar import Grammar
from sportsllm.simulator.scene import Scene, counted, nth, paragraphs, weighted
from sportsllm.simulator.tennis_text import TENNIS, TRAIT_WORDS
from sportsllm.simulator.world import Event, Person, world

ROUNDS = ("first round", "second round", "quarter-final", "semi-final", "final")
_NEXT = ("second round", "quarter-final", "semi-final", "final", "trophy")
_LIKES = {
    "clay": ("baseline", "forehand"),
    "grass": ("serve", "net", "slice"),
    "hard court": ("backhand", "forehand"),
}
_RULES = dict(TENNIS)
_RULES.pop("shot")
_BREAKS = _RULES.pop("break")
for _trait in TRAIT_WORDS:
    _RULES[f"break_{_trait}"] = tuple(text.replace("<shot>", f"<shot_{_trait}>") for text in _BREAKS)
GRAMMAR = Grammar(_RULES)
Game = dict[str, Any]


def _edge(event: Event, players: tuple[Person, Person]) -> float:
    """How much better the first player is here: ranking, form and surface."""
    liked = _LIKES.get(event.kind, ("serve", "backhand"))
    worth = [player.weight * 2.2 + 0.12 * player.skill + 0.25 * (player.trait in liked) for player in players]
    return worth[0] - worth[1]


def _set(rng: Random, edge: float, server: int, base: float) -> list[Game]:
    """The games of one set; the last may be a tie-break."""
    won, games = [0, 0], list[Game]()
    while True:
        if won == [6, 6]:
            side = int(rng.random() > 0.5 + 0.25 * edge)
            low = int(6 * rng.random() ** 0.7)
            high = 7 if low < 6 else low + 2
            won[side] += 1
            games.append({"kind": "tiebreak", "side": side, "score": tuple(won), "points": f"{high}-{low}"})
            return games
        better = edge if server == 0 else -edge
        holds = rng.random() < base + 0.17 * better
        side = server if holds else 1 - server
        won[side] += 1
        points = ("love", "15", "30")[int(3 * rng.random() ** 0.8)]
        kind = ("hold", "hold", "tight", "ace")[int(4 * rng.random())] if holds else "break"
        games.append({"kind": kind, "side": side, "score": tuple(won), "points": points})
        server = 1 - server
        if max(won) >= 6 and abs(won[0] - won[1]) >= 2:
            return games


def _match(rng: Random, event: Event, players: tuple[Person, Person]) -> list[list[Game]]:
    """Sets until somebody has two."""
    edge, sets, won, server = _edge(event, players), list[list[Game]](), [0, 0], int(2 * rng.random())
    base = (0.66 if event.women else 0.76) + {"grass": 0.04, "clay": -0.05}.get(event.kind, 0.0)
    while max(won) < 2:
        games = _set(rng, edge + 0.1 * rng.gauss(0, 1), server, base)
        server = (server + len(games)) % 2
        won[games[-1]["side"]] += 1
        sets.append(games)
    return sets


def _result(sets: list[list[Game]], first: int) -> str:
    """6-4 3-6 7-6 as seen by one player."""
    return " ".join(f"{games[-1]['score'][first]}-{games[-1]['score'][1 - first]}" for games in sets)


def _ticker(scene: Scene, players: tuple[Person, Person], sets: list[list[Game]], result: str) -> str:
    """One line per game; the score in the set has the first-named player first."""
    lines, won = [], [0, 0]
    for number, games in enumerate(sets, 1):
        opener = games[0]["side"] if games[0]["kind"] != "break" else 1 - games[0]["side"]
        lines.append(scene.say("set", {"n": str(number), "p": players[opener].last}))
        for game in games:
            player, other = players[game["side"]], players[1 - game["side"]]
            slots = {"p": player.last, "o": other.last, "points": game["points"]}
            slots["games"] = f"{game['score'][0]}-{game['score'][1]}"
            if game["kind"] == "tiebreak":
                lines.append(scene.say("tiebreak", slots))
            else:
                rule = game["kind"] if game["kind"] != "break" else f"break_{player.trait}"
                lines.append(scene.say(rule, slots))
        won[game["side"]] += 1
        slots["sets"] = f"{players[0].last} {won[0]}, {players[1].last} {won[1]}"
        if max(won) < 2:
            lines.append(scene.say("setwon", slots))
    lines.append(scene.say("match", {"p": player.name, "result": result}))
    return "\n".join(lines)


def _story(scene: Scene, players: tuple[Person, Person], sets: list[list[Game]]) -> list[str]:
    """Set by set, with the breaks counted."""
    told = []
    for number, games in enumerate(sets, 1):
        side, last = games[-1]["side"], games[-1]
        slots = {"p": players[side].last, "nth": nth(number), "points": last["points"]}
        slots["games"] = f"{max(last['score'])}-{min(last['score'])}"
        breaks = sum(game["kind"] == "break" and game["side"] == side for game in games)
        slots["breaks"] = counted(breaks, "break") + " of serve"
        told.append(scene.say("tell_tiebreak" if last["kind"] == "tiebreak" else "tell_set", slots))
    return told


def _statistics(players: tuple[Person, Person], sets: list[list[Game]]) -> str:
    """Sums over the sets, written out."""
    lines = []
    for side, player in enumerate(players):
        games = [part[-1]["score"][side] for part in sets]
        breaks = sum(game["kind"] == "break" and game["side"] == side for part in sets for game in part)
        lines.append(f"{player.last}: games {' + '.join(map(str, games))} = {sum(games)}, breaks {breaks}")
    return "\n".join(lines)


def play(rng: Random) -> tuple[str, dict[str, Any]]:
    """One match: its text and its facts."""
    events = world().events["tennis"]
    event = events[int(len(events) * rng.random() ** 1.4)]
    tour = world().tours["women" if event.women else "men"]
    stage = int(5 * rng.random() ** 1.2)
    first, second = (int(len(tour) * rng.random() ** (1.5 + 0.5 * stage)) for _ in range(2))
    if first == second:
        second = (first + 1 + int(5 * rng.random())) % len(tour)
    players = (tour[first], tour[second])
    sets = _match(rng, event, players)
    best = sets[-1][-1]["side"]
    winner, loser = players[best], players[1 - best]
    minutes = sum(4 * len(games) + 2 + int(len(games) * rng.random()) for games in sets)
    length = (
        f"{counted(minutes // 60, 'hour')} and {counted(minutes % 60, 'minute')}"
        if minutes >= 60
        else f"{minutes} minutes"
    )
    kind = "straight" if len(sets) == 2 else "long"
    result = _result(sets, best)
    voice = event.voice
    slots = {
        **{
            "name": event.name,
            "round": ROUNDS[stage],
            "venue": event.venue,
            "surface": event.kind,
            "town": event.town,
        },
        **{"a": players[0].name, "b": players[1].name, "alast": players[0].last, "blast": players[1].last},
        **{
            "atrait": TRAIT_WORDS[players[0].trait],
            "btrait": TRAIT_WORDS[players[1].trait],
            "next": _NEXT[stage],
        },
        **{
            "aepi": players[0].epithets[0],
            "bepi": players[1].epithets[0],
            "writer": voice.name,
            "paper": voice.paper,
        },
        **{
            "winner": winner.name,
            "loser": loser.name,
            "wlast": winner.last,
            "llast": loser.last,
            "result": result,
        },
        **{"wtrait": TRAIT_WORDS[winner.trait], "Whe": winner.he.capitalize(), "wepi": winner.epithets[1]},
        **{"length": length},
    }
    scene = Scene(rng, GRAMMAR, voice, slots)
    weather = "indoor" if "indoor" in event.kind else weighted(rng, event.region.climate)
    live = rng.random() < 0.65
    parts: list[str | list[str]] = [scene.say("title_open" if live else f"title_{kind}"), scene.say("byline")]
    if live:
        parts += [scene.say("preview"), _ticker(scene, players, sets, result)]
    if not live or rng.random() < 0.8:
        parts.append([scene.say(f"lead_{kind}"), scene.say("weather_" + weather)])
        parts.append(_story(scene, players, sets))
        parts.append([scene.say("quotes"), scene.say("next_final" if stage == 4 else "next")])
        parts.append(f"Result: {winner.name} beat {loser.name} {result}")
    if not live or rng.random() < 0.5:
        parts.append(_statistics(players, sets))
    text = paragraphs(parts)
    score = [sum(games[-1]["side"] == side for games in sets) for side in (0, 1)]
    return text, {
        "players": [player.name for player in players],
        "winner": winner.name,
        "sets": [list(games[-1]["score"]) for games in sets],
        "score": score,
        "result": result,
        "tournament": event.name,
        "asks": _asks(text, event, players, sets, best),
    }


def _asks(
    text: str, event: Event, players: tuple[Person, Person], sets: list[list[Game]], best: int
) -> list[list[Any]]:
    """Winner, sets and games."""
    others = [player.name for player in world().tours["women" if event.women else "men"][:20]]
    games = sum(len(part) for part in sets)
    options = ["6-4", "6-3", "7-5", "6-2", "7-6", "6-1", "6-0"]
    names = [players[best].name, players[1 - best].name, *others]
    first = sets[0][-1]
    asks: list[list[Any]] = [
        ["winner", "Who won the match?", players[best].name, names],
        ["loser", "Who lost the match?", players[1 - best].name, names],
        ["first_set", "Who won the first set?", players[first["side"]].name, names],
        [
            "set_score",
            "By what score was the first set won?",
            f"{max(first['score'])}-{min(first['score'])}",
            options,
        ],
        [
            "games",
            "How many games were played?",
            str(games),
            [str(games + step) for step in (-4, -3, -1, 2, 3, 5)],
        ],
    ]
    if event.name in text:
        tournaments = [other.name for other in world().events["tennis"]]
        asks.append(["tournament", "At which tournament was it played?", event.name, tournaments])
    return asks
