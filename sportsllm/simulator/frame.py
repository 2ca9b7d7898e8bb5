"""The shape of a match document: which parts it has, in which order, and whose they are."""

from collections.abc import Callable, Sequence
from typing import Any

from sportsllm.simulator.common_text import STYLE_WORDS
from sportsllm.simulator.grammar import Grammar
from sportsllm.simulator.scene import Fixture, Scene, counted, listed, paragraphs
from sportsllm.simulator.world import Person


def open_scene(match: Fixture, grammar: Grammar, score: Sequence[int], clear: int, rout: int) -> tuple[str, Scene]:
    """The kind of result (draw, narrow, easy or rout) and a scene with every slot that follows from it.

    A margin below `clear` is narrow, from `rout` on a rout.
    """
    kind, slots = match.result(score, clear, rout)
    slots["next"] = str(match.round + 1)
    slots["homestyle"], slots["awaystyle"] = STYLE_WORDS[match.home.style], STYLE_WORDS[match.away.style]
    slots["winstyle"] = slots["homestyle"] if score[0] > score[1] else slots["awaystyle"]
    slots["homekeeper"], slots["awaykeeper"] = match.home.squad[0].name, match.away.squad[0].name
    return kind, Scene(match.rng, grammar, match.voice, {**match.slots, **slots})


def compose(
    scene: Scene,
    match: Fixture,
    kind: str,
    live: Callable[[], str],
    story: Callable[[], list[str]],
    statistics: Callable[[], str],
    lead: str = "",
    best: tuple[Person, int, str] | None = None,
) -> str:
    """A document with some of: headline, preview, the match as it happened, report, quotes, statistics.

    A headline over a live text does not give the result away, so that what follows has to be followed.
    `lead` is the rule of the report's first sentence where the kind of result does not name it, and `best`
    the player of the match with the side and the reason.
    """
    random = scene.random
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
        opening = scene.say(lead or "lead_" + kind)
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


def with_kinds(rules: dict[str, tuple[str, ...]], kinds: Sequence[str]) -> dict[str, list[str]]:
    """Write out every rule that mentions {kind} once per kind, as name_kind; leave the others as they are."""
    out: dict[str, list[str]] = {}
    for name, templates in rules.items():
        if any("_{kind}" in template for template in templates):
            for kind in kinds:
                out[f"{name}_{kind}"] = [template.replace("{kind}", kind) for template in templates]
        else:
            out[name] = list(templates)
    return out


def best_player(events: Sequence[dict[str, Any]]) -> tuple[Person, int, str] | None:
    """Whoever had the largest hand in the goals (a goal is worth two assists); nobody without any."""
    tally: dict[str, list[int]] = {}
    found: dict[str, tuple[Person, int]] = {}
    for event in events:
        if event["kind"] != "goal" or event["how"] == "own":
            continue
        for role, key in enumerate(("player", "other")):
            if role and event["how"] in ("pen", "freekick"):
                continue
            player = event[key]
            found[player.name] = (player, event["side"])
            tally.setdefault(player.name, [0, 0])[role] += 1
    if not tally:
        return None
    name = max(tally, key=lambda one: (2 * tally[one][0] + tally[one][1], tally[one][0]))
    goals, assists = tally[name]
    feats = ([counted(goals, "goal")] if goals else []) + ([counted(assists, "assist")] if assists else [])
    return (*found[name], listed(feats))
