"""Says things about one contest in one writer's voice: full names first, surnames after that."""

from collections.abc import Mapping
from random import Random

from sportsllm.simulator.grammar import Grammar, Voice
from sportsllm.simulator.world import Person


class Scene:
    """One contest as its writer tells it; `slots` hold in every sentence."""

    def __init__(self, rng: Random, grammar: Grammar, voice: Voice, slots: dict[str, str]) -> None:
        self.rng = rng
        self.grammar = grammar
        self.voice = voice
        self.slots = {**slots, "writer": voice.name, "paper": voice.paper}
        self.met: set[str] = set()  # surnames of those whose full name the text has given
        self.due: list[Person] = []  # the players of the event at hand

    def say(self, rule: str, *extra: Mapping[str, str]) -> str:
        """One sentence or more from `rule`; later slots win over earlier ones."""
        slots = self.slots
        if extra:
            slots = dict(slots)
            for more in extra:
                slots.update(more)
        text = self.grammar.say(rule, slots, self.voice.offsets, self.rng.random)
        for player in self.due:
            if player.name in text:
                self.met.add(player.last)
        return text

    def person(self, player: Person) -> dict[str, str]:
        """Slots for the player an event is about."""
        self.due = [player]
        return {
            "p": player.last if player.last in self.met else player.name,
            "last": player.last,
            **player.pronouns,
            "epi": player.epithets[int(self.rng.random() ** 2 * len(player.epithets))],
        }

    def second(self, player: Person) -> dict[str, str]:
        """Slots for another player in the same event."""
        self.due.append(player)
        return {"q": player.last if player.last in self.met else player.name}
