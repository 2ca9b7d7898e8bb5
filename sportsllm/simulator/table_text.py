"""Templates of a group or league round-up. Slots: p the club, q the one after it, "
"pts and others numbers in words."""

TABLE: dict[str, tuple[str, ...]] = {
    "title": (
        "{league}: [group|cup group] of {size}, all results and final table",
        "{league} cup, group {letter}: how it [ended|finished]",
        "[Final table|The table], {league} cup group {letter}",
    ),
    "byline": ("By {writer}, {paper}", "{paper} - {writer} looks back"),
    "lead": (
        ("{pfull} [won|finished top of] the group with {pts} from {games}, [ahead of|in front of] {qfull}."),
        (
            "[First place|Top spot] went to {pfull}, who [collected|took] {pts} from {games}; "
            "{qfull} [came second|were runners-up]."
        ),
    ),
    "level": (
        ("{p} and {q} [both had|finished level on] {pts}, and goal difference [decided it|put {p} ahead]."),
        "Only goal difference [separated|told apart] {p} and {q}[| in the end].",
    ),
    "level_goals": (("{p} and {q} could not be separated by points or goal difference; goals scored put {p} ahead."),),
    "gap": ("The gap between {p} and {q} was {gap}.", "{p} had {gap} [more than|in hand over] {q}."),
    "perfect": ("{p} won [all their matches|every match].", "[Perfect|Flawless]: {p} dropped no points."),
    "unbeaten": ("{p} [stayed unbeaten|did not lose a match].",),
    "bottom": (
        "{p} [finished last|came bottom|propped up the table] with {pts}.",
        "[Last place|The bottom spot] went to {p}, with {pts}.",
    ),
    "winless": ("{p} did not win a match[| all week].",),
    "biggest": (
        "The biggest win was {p}'s {score} over {q}.",
        "No result was [clearer|heavier] than {score}, {p} against {q}.",
    ),
    "attack": ("{p} [scored most|had the best attack], with {goals}.",),
    "defence": ("{p} [conceded fewest|had the tightest defence], letting in {goals}.",),
    "quote": (
        (
            '"[A long road|What a week|We earned it]," said {coach}. "[Nobody believed in us|The '
            'squad is deep|Now the next round]."'
        ),
        "{coach} [praised|thanked] {nick} for [their spirit|their patience|a fine week].",
    ),
}
