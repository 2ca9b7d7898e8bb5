"""Tennis: game by game, best of three sets, with breaks, tie-breaks and the time it took."""

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

from sportsllm.simulator.telling import Ask, Scene, counted, near, nth
from sportsllm.simulator.world import Tournament, skewed, words, world

_ROUNDS = ("first round", "second round", "quarter-final", "semi-final", "final", "trophy")
_SCORES = ("6-4", "6-3", "7-5", "6-2", "7-6", "6-1", "6-0")


@dataclass(frozen=True)
class Game:
    """One game or tie-break: who won it, and the score in the set after it, first player first.

    `kind` is hold, tight, ace, break or tiebreak; `points` are the loser's, in a tie-break both.
    """

    kind: str
    side: int
    score: tuple[int, int]
    points: str


def _set(rng: Random, edge: float, server: int, base: float) -> list[Game]:
    """The games of one set; the last may be a tie-break."""
    won, games = [0, 0], list[Game]()
    while max(won) < 6 or (abs(won[0] - won[1]) < 2 and max(won) < 7):
        if won == [6, 6]:
            side, low = int(rng.random() > 0.5 + 0.25 * edge), skewed(rng, 6, 0.7)
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


class Match:
    """Who meets where, and all that happens."""

    def __init__(self, rng: Random) -> None:
        self.event: Tournament = world().tournaments[skewed(rng, len(world().tournaments), 1.4)]
        self.tour, self.stage = self.event.tour, skewed(rng, 5, 1.2)
        first, second = (skewed(rng, len(self.tour), 1.5 + 0.5 * self.stage) for _ in range(2))
        if first == second:
            second = (first + 1 + skewed(rng, 5, 1)) % len(self.tour)
        self.players = (self.tour[first], self.tour[second])
        edge = 2.2 * (self.players[0].weight - self.players[1].weight)
        base = 0.66 if self.tour[0].pronouns["he"] == "she" else 0.76
        self.sets, won, server = list[list[Game]](), [0, 0], skewed(rng, 2, 1)
        while max(won) < 2:
            self.sets.append(_set(rng, edge + 0.1 * rng.gauss(0, 1), server, base))
            server = (server + len(self.sets[-1])) % 2
            won[self.sets[-1][-1].side] += 1
        best = self.sets[-1][-1].side
        self.winner, self.loser = self.players[best], self.players[1 - best]
        self.result = " ".join(f"{games[-1].score[best]}-{games[-1].score[1 - best]}" for games in self.sets)
        self.minutes = sum(4 * len(games) + 2 + skewed(rng, len(games), 1) for games in self.sets)

    def slots(self) -> dict[str, str]:
        """Slots for every sentence about the match."""
        event, strengths = self.event, words().strengths
        slots = {"name": event.name, "venue": event.venue, "surface": event.surface, "town": event.town}
        slots |= {"round": _ROUNDS[self.stage], "next": _ROUNDS[self.stage + 1], "result": self.result}
        slots |= {"length": f"{self.minutes} minutes", "Whe": self.winner.pronouns["he"].capitalize()}
        for letter, player in zip("abwl", (*self.players, self.winner, self.loser), strict=True):
            slots |= {letter: player.name, f"{letter}last": player.last, f"{letter}strength": strengths[player.trait]}
            slots[f"{letter}epi"] = player.epithets[letter == "w"]
        return slots

    def statistics(self) -> Iterator[str]:
        """Sums over the sets, written out."""
        for side, player in enumerate(self.players):
            games = [part[-1].score[side] for part in self.sets]
            breaks = sum(_breaks(part, side) for part in self.sets)
            yield f"{player.last}: games {' + '.join(map(str, games))} = {sum(games)}, breaks {breaks}"


def _breaks(games: list[Game], side: int) -> int:
    return sum(game.kind == "break" and game.side == side for game in games)


def _live(scene: Scene, match: Match) -> Iterator[str]:
    """One line per game; the score in the set has the first-named player first."""
    won, last = [0, 0], [player.last for player in match.players]
    for number, games in enumerate(match.sets, 1):
        server = games[0].side if games[0].kind != "break" else 1 - games[0].side
        yield scene.say("set", {"n": str(number), "p": last[server]})
        for game in games:
            slots = {"p": last[game.side], "o": last[1 - game.side], "points": game.points}
            slots |= {"games": f"{game.score[0]}-{game.score[1]}", "trait": match.players[game.side].trait}
            yield scene.say(game.kind, slots)
        won[games[-1].side] += 1
        if max(won) < 2:
            yield scene.say("setwon", slots, {"sets": f"{last[0]} {won[0]}, {last[1]} {won[1]}"})
    yield scene.say("match", {"p": match.winner.name})


def _report(scene: Scene, match: Match) -> Iterator[str]:
    """Set by set, with the breaks counted."""
    for number, games in enumerate(match.sets, 1):
        last = games[-1]
        slots = {"p": match.players[last.side].last, "nth": nth(number), "points": last.points}
        slots["games"] = f"{max(last.score)}-{min(last.score)}"
        slots["breaks"] = f"{counted(_breaks(games, last.side), 'break')} of serve"
        yield scene.say("tell_tiebreak" if last.kind == "tiebreak" else "tell_set", slots)


def _asks(text: str, match: Match) -> Iterator[Ask]:
    """Winner, sets and games."""
    names = [player.name for player in (*match.players, *match.tour[:20])]
    first, games = match.sets[0][-1], sum(map(len, match.sets))
    yield Ask("winner", "Who won the match?", match.winner.name, names)
    yield Ask("loser", "Who lost the match?", match.loser.name, names)
    yield Ask("first_set", "Who won the first set?", match.players[first.side].name, names)
    yield Ask("set_score", "By what score was the first set won?", f"{max(first.score)}-{min(first.score)}", _SCORES)
    yield Ask("games", "How many games were played?", str(games), near(games))
    if match.event.name in text:
        tournaments = [other.name for other in world().tournaments]
        yield Ask("tournament", "At which tournament was it played?", match.event.name, tournaments)


def play(rng: Random) -> tuple[str, list[Ask]]:
    """One match, live, in a report or both, and questions about it."""
    match = Match(rng)
    scene = Scene(rng, "tennis", match.event.writer, match.slots())
    kind, live = "straight" if len(match.sets) == 2 else "long", rng.random() < 0.65
    parts = [scene.say("title_open" if live else f"title_{kind}"), scene.say("byline")]
    if live:
        parts += [scene.say("preview"), "\n".join(_live(scene, match))]
    if not live or rng.random() < 0.8:
        parts += [scene.say(f"lead_{kind}"), " ".join(_report(scene, match))]
        parts.append(f"{scene.say('quotes')} {scene.say('next')}")
        parts.append(f"Result: {match.winner.name} beat {match.loser.name} {match.result}")
    if not live or rng.random() < 0.5:
        parts.append("\n".join(match.statistics()))
    text = "\n\n".join(parts)
    return text, list(_asks(text, match))
