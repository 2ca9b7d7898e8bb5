"""Templates of twenty-over cricket. Slots: p the batter, q the bowler, f a fielder, "
"over the over and ball."""

CRICKET: dict[str, tuple[str, ...]] = {
    "toss": (
        "{team} [won the toss|called correctly] and [chose to bat|batted first] at {venue}.",
        ("[The coin fell for|Heads it was for] {team}, who [elected to bat|took first use of the pitch]."),
    ),
    "innings": ("{full} innings", "[Innings of {full}|{full} bat]"),
    "wicket": ("{over} WICKET! <out_{kind}> {p} goes for {runs}. {total}.",),
    "out_caught": (
        "{p} [skies|chips|edges] {q} and {f} [takes the catch|makes no mistake|clings on].",
        "{f} [runs in|dives] to [hold on|catch {p}] off {q}.",
    ),
    "out_bowled": (
        "{q} [knocks back the off stump of|bowls|beats and bowls] {p}.",
        "[Through the gate!|Timber!] {q} [bowls|castles] {p}.",
    ),
    "out_lbw": (
        "{p} [is trapped|is pinned] in front by {q}.",
        "[Up goes the finger|Leg before]: {q} [gets|removes] {p}.",
    ),
    "out_stumped": (("{p} [dances down|overbalances] to {q} and {f} [whips off the bails|completes the stumping]."),),
    "out_runout": ("[Mix-up!|A yes, a no]: {p} is run out by {f}.",),
    "fifty": (
        "{over} [Fifty for|A half-century for] {p} with a {shot}. {total}.",
        "{over} {p} [reaches|raises] a half-century with a {shot}. {total}.",
    ),
    "hundred": ("{over} A hundred for {p}! {total}.",),
    "six": (("{over} SIX! {p} [launches|lifts|hits] {q} [over long-on|into the stands|over midwicket]. {total}."),),
    "over": ("After {n} overs: {total}.", "[{n} overs gone|At the end of over {n}]: {total}."),
    "closed": ("[Innings closed|End of the innings]: {total}.", "{team} [finish|end] on {total}."),
    "target": ("{team} need {need} to win.", "The target [is|will be] {need}."),
    "done": ("[It is over|That is the match]: {verdict}.",),
    "lead": (
        "{winfull} beat {losefull} by {by} at {venue} [on {day}|in the {league}].",
        "[In the {league}|At {venue}] {winfull} [got home|won] by {by} against {losefull}.",
    ),
    "lead_tie": ("{homefull} and {awayfull} tied at {venue}, both on {tied}.",),
    "tell_bat": (
        "{p}, {epi}, made {runs} off {balls} balls for {team}.",
        "{p} [top-scored for|led the way for] {team} with {runs} off {balls}.",
    ),
    "tell_bowl": (
        "{p} took {figures}.",
        "[With the ball|Among the bowlers] {p} [stood out|shone] with {figures}.",
    ),
    "tell_total": ("{team} [made|reached|finished on] {total}.",),
    "pair": (("{p} and {q} put on {stand} for the {nth} wicket, the best stand of the {team} innings."),),
}
SHOTS = {"drive": "drive", "pull": "pull", "sweep": "sweep", "cut": "late cut", "loft": "lofted shot"}
