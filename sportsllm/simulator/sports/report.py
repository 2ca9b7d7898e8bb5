"""The shape of a match document: which parts it has, in which order, and which words its result fills in."""

from collections.abc import Callable, Sequence

from sportsllm.simulator.grammar import Grammar
from sportsllm.simulator.scene import Scene
from sportsllm.simulator.sports.fixture import Fixture
from sportsllm.simulator.wording import paragraphs
from sportsllm.simulator.world import Person


def result_kind(score: Sequence[int], clear: int, rout: int) -> str:
    """draw, narrow, easy or rout: a margin below `clear` is narrow, from `rout` on a rout."""
    margin = abs(score[0] - score[1])
    return "draw" if not margin else "narrow" if margin < clear else "easy" if margin < rout else "rout"


def open_scene(match: Fixture, grammar: Grammar, score: Sequence[int]) -> Scene:
    """A scene with every slot that follows from the result; after a draw the home side stands as the winner."""
    first = 0 if score[0] >= score[1] else 1
    winner, loser = match.clubs[first], match.clubs[1 - first]
    slots = {**match.slots, **winner.slots("win"), **loser.slots("lose")}
    slots |= {"score": f"{max(score)}-{min(score)}", "final": match.running(score)}
    slots["place"] = "away from home" if first else "at home"
    return Scene(match.rng, grammar, match.voice, slots)


def compose(
    scene: Scene,
    match: Fixture,
    kind: str,
    live: Callable[[], str],
    story: Callable[[], list[str]],
    statistics: Callable[[], str],
    best: tuple[Person, int, str] | None = None,
) -> str:
    """A document with some of: headline, preview, the match as it happened, report, quotes, statistics.

    A headline over a live text does not give the result away, so that what follows has to be followed.
    `best` is the player of the match with the side and the reason.
    """
    random = match.rng.random
    with_live, with_story = random() < 0.62, random() < 0.8
    parts: list[str | list[str]] = [scene.say("title_open") if with_live else scene.say("title_" + kind)]
    parts.append(scene.say("byline"))
    if with_live:
        if random() < 0.5:
            parts.append([scene.say("preview"), *([scene.say("derby")] if match.derby else [])])
        parts.append(live())
    if with_story or not with_live:
        scene.met.clear()
        full = match.crowd == match.home.capacity
        opening = scene.say("lead_" + kind)
        parts.append([opening, scene.say("weather_" + match.weather), scene.say("full_house" if full else "crowd")])
        parts.append(story())
        if best and random() < 0.75:
            player, side, feat = best
            slots = {**scene.person(player), "team": match.clubs[side].short, "feat": feat}
            parts.append(scene.say("best", slots))
        elif random() < 0.4:
            parts.append(scene.say("captain"))
        parts.append([scene.say("quotes_" + kind), scene.say("next_draw" if kind == "draw" else "next_win")])
        parts.append(f"Final score: {scene.slots['final']}")
    if not with_live or random() < 0.5:
        parts.append(statistics())
    return paragraphs(parts)
