"""Templates of a cycling stage race. Slots: p, q, r riders, km the distance covered, gap a time."""

CYCLING: dict[str, tuple[str, ...]] = {
    "title_open": (
        "{race}, stage {n}: {start} to {finish}, {km} km, {terrain}",
        "Stage {n} of the {race}: {km} km from {start} to {finish}",
    ),
    "title_done": (
        "{wlast} [wins|takes|strikes on] stage {n} in {finish}",
        "{race}: [joy|triumph] for {wlast} in {finish}",
    ),
    "byline": ("By {writer}, {paper}", "{writer} in {finish} for the {paper}"),
    "start": (
        ("km 0 The flag drops in {start}: {km} km of {terrain} roads to {finish}, with the {climb} on the way."),
        ("km 0 [Away from|They roll out of] {start} for {km} km. The {climb} [waits|comes at km {climbkm}]."),
    ),
    "break": (
        ("km {at} {p} of {pteam} [attacks|goes clear|slips away] and {q} ({qteam}) [joins|follows|bridges across]."),
        "km {at} [The break forms|A pair goes clear]: {p} ({pteam}) and {q} ({qteam}).",
    ),
    "gap": (
        ("km {at} The break leads by {gap}; {chase} [set the pace|do the chasing|work at the front]."),
        ("km {at} {gap} [is the gap|between break and bunch]. {chase} [keep it in check|ride tempo]."),
    ),
    "crash": (("km {at} {p} of {pteam} [goes down|crashes] [in a bend|at a roundabout] but [remounts|is soon back]."),),
    "puncture": (("km {at} [Puncture|Flat tyre] for {p} ({pteam}), who [gets a quick wheel|chases back]."),),
    "climb": (
        "km {at} {p} [is first over|crests] the {climb}[|, {q} on the wheel].",
        "km {at} On the {climb} {p} [drops {q}|sets a fierce rhythm|goes over first].",
    ),
    "caught": ("km {at} The break is [caught|reeled in|over], {left} km from {finish}.",),
    "sprint": (("km {km} [Sprint!|They sprint for it:] {p} [beats|edges|comes round] {q} and {r} in {finish}."),),
    "solo": (("km {km} {p} [arrives alone|has time to raise both arms] in {finish}, {gap} ahead of {q}."),),
    "lead_flat": (
        (
            "{winner} of {wteam} [won|took] the sprint [for|on] stage {n} of the {race} in "
            "{finish}, ahead of {second} and {third}."
        ),
        (
            "[The fast men ruled|It came down to a sprint] in {finish}, where {winner} ({wteam}) "
            "[beat|outpaced] {second} and {third}."
        ),
    ),
    "lead_hilly": (
        (
            "{winner} of {wteam} [won|took] stage {n} of the {race} [on the last rise|after a "
            "hilly day], {gap} ahead of {second}."
        ),
        ("{winner} ({wteam}) [slipped away near the end|attacked late] to win in {finish} by {gap} from {second}."),
    ),
    "lead_mountain": (
        ("{winner} of {wteam} [soared|danced] over the {climb} to win stage {n} of the {race} by {gap} from {second}."),
        ("[The mountains spoke|The {climb} decided it]: {winner} ({wteam}) won in {finish}, {gap} ahead of {second}."),
    ),
    "tell_break": (
        "{p} and {q} had been [away|in front] since km {at} and led by as much as {gap}.",
        "The early break of {p} and {q}, [formed|gone] after {at} km, [once had|was given] {gap}.",
    ),
    "tell_climb": ("{p} [was first over|led across] the {climb}.",),
    "quote": (
        (
            '"[My legs were good|The team rode for me all day|I waited and waited]," said '
            '{wlast}. "[This is for {whome}|I can hardly believe it]."'
        ),
        ('{wlast}, {wepi}, [thanked|hugged] {his} team-mates: "[They never let me down|Without them, nothing]."'),
    ),
    "overall_same": ("{leader} ({lteam}) [keeps|stays in] the leader's jersey, {lgap} ahead of {next}.",),
    "overall_new": (("{leader} ({lteam}) [takes over|pulls on] the leader's jersey, {lgap} ahead of {next}."),),
    "tomorrow": (
        "Next: stage {m}, from {start2} to {finish2}, {km2} km.",
        "Stage {m} [goes|leads] from {start2} to {finish2} over {km2} km.",
    ),
    "last": ("The {race} is [over|decided]: {leader} wins it.",),
}
