"""Tennis: game by game, best of three sets, with breaks, tie-breaks and the time it took."""

from dataclasses import dataclass
from random import Random
from typing import Any

from sportsllm.simulator.draws import skewed, weighted
from sportsllm.simulator.grammar import grammar
from sportsllm.simulator.scene import Scene
from sportsllm.simulator.vocabulary import TENNIS
from sportsllm.simulator.wording import counted, nth, paragraphs, summed
from sportsllm.simulator.world import Person, Tournament, world

ROUNDS = ("first round", "second round", "quarter-final", "semi-final", "final", "trophy")
_FINAL = 4
_LIKES = {"clay": ("baseline", "forehand"), "grass": ("serve", "net", "slice"), "hard court": ("backhand", "forehand")}
_HOLDS = {"grass": 0.04, "clay": -0.05}  # how much likelier a server wins the game


@dataclass(slots=True)
class Game:
    """One game or tie-break: who won it, and the score in the set after it, first player first."""

    kind: str  # hold, tight, ace, break or tiebreak
    side: int
    score: tuple[int, int]
    points: str  # of the loser; of both in a tie-break


@dataclass(slots=True)
class Match:
    """Everything that was drawn about one match."""

    event: Tournament
    stage: int  # index into ROUNDS
    players: tuple[Person, Person]
    sets: list[list[Game]]
    winner: Person
    loser: Person
    result: str  # 6-4 3-6 7-6, the winner's games first
    minutes: int
    weather: str


def _worth(player: Person, surface: str) -> float:
    """How good a player is here: ranking, form and surface."""
    likes = player.trait in _LIKES.get(surface, ("serve", "backhand"))
    return player.weight * 2.2 + 0.12 * player.skill + 0.25 * likes


def _set(rng: Random, edge: float, server: int, base: float) -> list[Game]:
    """The games of one set; the last may be a tie-break."""
    won, games = [0, 0], list[Game]()
    while max(won) < 6 or (abs(won[0] - won[1]) < 2 and max(won) < 7):
        if won == [6, 6]:
            side = int(rng.random() > 0.5 + 0.25 * edge)
            low = skewed(rng, 6, 0.7)
            kind, points = "tiebreak", f"{7 if low < 6 else low + 2}-{low}"
        else:
            holds = rng.random() < base + 0.17 * (edge if server == 0 else -edge)
            side = server if holds else 1 - server
            points = ("love", "15", "30")[skewed(rng, 3, 0.8)]
            kind = ("hold", "hold", "tight", "ace")[skewed(rng, 4, 1)] if holds else "break"
        won[side] += 1
        games.append(Game(kind, side, (won[0], won[1]), points))
        server = 1 - server
    return games


def _sets(rng: Random, event: Tournament, first: Person, second: Person) -> list[list[Game]]:
    """Sets until somebody has two."""
    edge = _worth(first, event.surface) - _worth(second, event.surface)
    sets, won, server = list[list[Game]](), [0, 0], skewed(rng, 2, 1)
    base = (0.66 if event.women else 0.76) + _HOLDS.get(event.surface, 0.0)
    while max(won) < 2:
        games = _set(rng, edge + 0.1 * rng.gauss(0, 1), server, base)
        server = (server + len(games)) % 2
        won[games[-1].side] += 1
        sets.append(games)
    return sets


def _match(rng: Random) -> Match:
    """Who meets where, and all that happens."""
    events = world().tournaments
    event = events[skewed(rng, len(events), 1.4)]
    tour = world().tours[event.women]
    stage = skewed(rng, 5, 1.2)
    first, second = (skewed(rng, len(tour), 1.5 + 0.5 * stage) for _ in range(2))
    if first == second:
        second = (first + 1 + skewed(rng, 5, 1)) % len(tour)
    players = (tour[first], tour[second])
    sets = _sets(rng, event, *players)
    best = sets[-1][-1].side
    result = " ".join(f"{games[-1].score[best]}-{games[-1].score[1 - best]}" for games in sets)
    minutes = sum(4 * len(games) + 2 + skewed(rng, len(games), 1) for games in sets)
    weather = "indoor" if "indoor" in event.surface else weighted(rng, event.region.climate)
    return Match(event, stage, players, sets, players[best], players[1 - best], result, minutes, weather)


def _slots(match: Match) -> dict[str, str]:
    """Slots for every sentence about the match."""
    event, winner, loser, strengths = match.event, match.winner, match.loser, TENNIS.traits
    hours, minutes = divmod(match.minutes, 60)
    length = f"{counted(hours, 'hour')} and {counted(minutes, 'minute')}" if hours else f"{minutes} minutes"
    slots = {
        "name": event.name,
        "round": ROUNDS[match.stage],
        "next": ROUNDS[match.stage + 1],
        "venue": event.venue,
        "surface": event.surface,
        "town": event.town,
        "winner": winner.name,
        "wlast": winner.last,
        "wepi": winner.epithets[1],
        "wtrait": strengths[winner.trait],
        "Whe": winner.pronouns["he"].capitalize(),
        "loser": loser.name,
        "llast": loser.last,
        "result": match.result,
        "length": length,
    }
    for letter, player in zip("ab", match.players, strict=True):
        slots |= {letter: player.name, letter + "last": player.last, letter + "epi": player.epithets[0]}
        slots[letter + "trait"] = strengths[player.trait]
    return slots


def _breaks(games: list[Game], side: int) -> int:
    return sum(game.kind == "break" and game.side == side for game in games)


def _ticker(scene: Scene, match: Match) -> str:
    """One line per game; the score in the set has the first-named player first."""
    lines, won, players = [], [0, 0], match.players
    for number, games in enumerate(match.sets, 1):
        opener = games[0].side if games[0].kind != "break" else 1 - games[0].side
        lines.append(scene.say("set", {"n": str(number), "p": players[opener].last}))
        for game in games:
            player, other = players[game.side], players[1 - game.side]
            slots = {"p": player.last, "o": other.last, "points": game.points}
            slots["games"] = f"{game.score[0]}-{game.score[1]}"
            lines.append(scene.say(f"break_{player.trait}" if game.kind == "break" else game.kind, slots))
        won[games[-1].side] += 1
        slots["sets"] = f"{players[0].last} {won[0]}, {players[1].last} {won[1]}"
        if max(won) < 2:
            lines.append(scene.say("setwon", slots))
    lines.append(scene.say("match", {"p": match.winner.name}))
    return "\n".join(lines)


def _story(scene: Scene, match: Match) -> list[str]:
    """Set by set, with the breaks counted."""
    told = []
    for number, games in enumerate(match.sets, 1):
        last = games[-1]
        slots = {"p": match.players[last.side].last, "nth": nth(number), "points": last.points}
        slots["games"] = f"{max(last.score)}-{min(last.score)}"
        slots["breaks"] = counted(_breaks(games, last.side), "break") + " of serve"
        told.append(scene.say("tell_tiebreak" if last.kind == "tiebreak" else "tell_set", slots))
    return told


def _statistics(match: Match) -> str:
    """Sums over the sets, written out."""
    lines = []
    for side, player in enumerate(match.players):
        games = [part[-1].score[side] for part in match.sets]
        breaks = sum(_breaks(part, side) for part in match.sets)
        lines.append(f"{player.last}: games {summed(games)}, breaks {breaks}")
    return "\n".join(lines)


def play(rng: Random) -> tuple[str, dict[str, Any]]:
    """One match: its text and its facts."""
    match = _match(rng)
    scene = Scene(rng, grammar("tennis"), match.event.voice, _slots(match))
    kind = "straight" if len(match.sets) == 2 else "long"
    live = rng.random() < 0.65
    parts: list[str | list[str]] = [scene.say("title_open" if live else f"title_{kind}"), scene.say("byline")]
    if live:
        parts += [scene.say("preview"), _ticker(scene, match)]
    if not live or rng.random() < 0.8:
        parts.append([scene.say(f"lead_{kind}"), scene.say("weather_" + match.weather)])
        parts.append(_story(scene, match))
        parts.append([scene.say("quotes"), scene.say("next_final" if match.stage == _FINAL else "next")])
        parts.append(f"Result: {match.winner.name} beat {match.loser.name} {match.result}")
    if not live or rng.random() < 0.5:
        parts.append(_statistics(match))
    text = paragraphs(parts)
    return text, {
        "players": [player.name for player in match.players],
        "winner": match.winner.name,
        "sets": [list(games[-1].score) for games in match.sets],
        "score": [sum(games[-1].side == side for games in match.sets) for side in (0, 1)],
        "result": match.result,
        "tournament": match.event.name,
        "asks": _asks(text, match),
    }


def _asks(text: str, match: Match) -> list[list[Any]]:
    """Winner, sets and games."""
    others = [player.name for player in world().tours[match.event.women][:20]]
    names = [match.winner.name, match.loser.name, *others]
    games = sum(len(part) for part in match.sets)
    near = [str(games + step) for step in (-4, -3, -1, 2, 3, 5)]
    first = match.sets[0][-1]
    score = f"{max(first.score)}-{min(first.score)}"
    scores = ["6-4", "6-3", "7-5", "6-2", "7-6", "6-1", "6-0"]
    asks: list[list[Any]] = [
        ["winner", "Who won the match?", match.winner.name, names],
        ["loser", "Who lost the match?", match.loser.name, names],
        ["first_set", "Who won the first set?", match.players[first.side].name, names],
        ["set_score", "By what score was the first set won?", score, scores],
        ["games", "How many games were played?", str(games), near],
    ]
    if match.event.name in text:
        tournaments = [other.name for other in world().tournaments]
        asks.append(["tournament", "At which tournament was it played?", match.event.name, tournaments])
    return asks
