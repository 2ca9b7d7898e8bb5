"""Templates of basketball. Slots: p shooter, q passer, clock the time left in the quarter."""

BASKETBALL: dict[str, tuple[str, ...]] = {
    "tip": (
        "[Tip-off|The ball goes up] at {venue}: {homefull} against {awayfull}.",
        "[We are off|Jump ball] at {venue}, [control to {team}|{team} with the first possession].",
    ),
    "how_three": (
        "{p} [drains|buries|splashes] a three [from the corner|from the wing|off {q}'s kick-out].",
        "[From downtown|Way outside]: {p} for three, {q} with the [pass|assist].",
    ),
    "how_drive": (
        "{p} [drives past|blows by] {d} and [lays it in|finishes off the glass].",
        "{p} [slashes|cuts] to the rim on a feed from {q}, [two points|easy two].",
    ),
    "how_post": (
        "{p} [backs down|posts up] {d} and [drops in the hook|turns and scores].",
        "{q} [dumps it inside|lobs it in] to {p}, who [goes up strong|banks it in].",
    ),
    "how_jumper": (
        "{p} [pulls up|rises] over {d} for a [jumper|mid-range two].",
        "[Screen from {q}|Off the dribble], {p} [sinks|knocks down] the jumper.",
    ),
    "how_dunk": (
        "{p} [throws it down|hammers home the dunk] [off a lob from {q}|on the break|over {d}].",
        "[Alley-oop!|What a slam!] {q} to {p}.",
    ),
    "how_free": (
        "{p}, fouled by {d}, [makes one of two|splits the free throws].",
        "[One of two|A single free throw] for {p} after {d}'s foul.",
    ),
    "now": ("{running}.", "[It is|That makes it|Score:] {running}."),
    "tie": ("[Tied at|All square,] {running}.",),
    "swing": ("{team} [take the lead|go in front|lead], {running}.", "[Lead change|New leaders]: {running}."),
    "run": (
        "That is {length} unanswered points for {team}.",
        "[A run of {length}-0|{length} in a row] by {nick}[|, and {oboss} calls time-out].",
    ),
    "quarter": ("End of the {nth} quarter: {running}.", "After the {nth} quarter it is {running}."),
    "again": ("[Overtime it is|Five more minutes]: {running} after four quarters.",),
    "full": ("[Final buzzer|It is over|That is the game]: {final}.",),
    "lead_narrow": (
        "{winfull} [edged|survived|slipped past] {losefull} {score} at {venue}.",
        ("It [took until the last possession|went to the wire], but {winnick} beat {losenick} {score}."),
    ),
    "lead_easy": (
        "{winfull} [beat|downed|took care of] {losefull} {score} [at {venue}|on {day}].",
        "{winboss}'s {win} [won|prevailed] {score} against {lose} [{place}|in the {league}].",
    ),
    "lead_rout": (
        "{winfull} [blew out|ran away from|crushed] {losefull} {score} at {venue}.",
        "{losenick} [never got going|were out of it early] and lost {score} to {winfull}.",
    ),
    "star": (
        "{p}, {epi}, [led all scorers with|finished with|poured in] {points} points for {team}.",
        ("[Nobody could stop|The night belonged to] {p}, who [scored|had] {points} points for {team}."),
    ),
    "other_star": (
        "{p} [answered with|had|led {team} with] {points}.",
        "For {team} {p} [scored|top-scored with] {points}.",
    ),
    "support": ("{q} [added|chipped in with] {more}.", "[Behind|After] {p} came {q} with {more}."),
    "won_quarter": (
        ("{team} [won|took|edged] the {nth} quarter {part}, [leaving it at|for a score of] {running}."),
        "The {nth} quarter went {part} to {team}: {running}.",
    ),
    "drawn_quarter": ("The {nth} quarter was level at {part}, {running} [overall|in all].",),
    "extra_story": ("[Overtime was needed|They went to overtime], which {team} won {part}.",),
}
