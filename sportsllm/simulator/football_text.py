"""Templates of association football. Slots: p scorer or main player, q the other "
"one, min the minute."""

FOOTBALL: dict[str, tuple[str, ...]] = {
    "kickoff": (
        (
            "1' [We are under way|Kick-off|The referee blows and we start] at {venue}. {home} "
            "[play|attack] from [left to right|right to left]."
        ),
        "1' {away} [kick off|get us started] in front of {crowd}.",
        (
            "1' [Off we go|Here we go]: {homenick} in {homecolours}, {awaynick} [in "
            "{awaycolours}|in their change strip]."
        ),
    ),
    "goal": ("{min}' [Goal!|GOAL!] <how_{kind}>",),
    "how_header": (
        ("{p} [heads|nods|powers] in {q}'s [cross|corner|deep delivery][| at the far post|| from six yards]."),
        (
            "{q} [swings in a cross|whips the ball in] and {p} [rises highest|climbs above the "
            "defence] to head [home|past {keeper}]."
        ),
        (
            "[A towering header|A glancing header] from {p} [beats|leaves no chance for] "
            "{keeper} after good work by {q}."
        ),
    ),
    "how_long": (
        (
            "{p} [lets fly|tries {his} luck|shoots] from [25|28|30] [yards|metres] and the ball "
            "[flies|screams|dips] [into the top corner|past {keeper}]."
        ),
        (
            "[What a strike|A thunderbolt] from {p}! {q} [rolled it back|laid it off] and "
            "{keeper} [never moved|could only watch]."
        ),
    ),
    "how_near": (
        ("{p} [taps in|pokes home|turns it in] from close range after {q} [squares it|finds {him}|cuts it back]."),
        (
            "[Scramble in the box|Panic in the {oshort} defence] and {p} [stabs|bundles] the "
            "ball over the line[| after {q}'s knock-down]."
        ),
        "{q} [slides the ball over|rolls it across goal] and {p} [cannot miss|makes no mistake].",
    ),
    "how_solo": (
        (
            "{p} [picks up a pass from {q}|takes {q}'s pass], [beats two men|dances past "
            "three|leaves two defenders behind] and [slots|rolls] it past {keeper}."
        ),
        (
            "[Brilliant|Wonderful] from {p}, who [runs half the length of the field|weaves "
            "through the {oshort} defence] and [finishes|scores]."
        ),
    ),
    "how_volley": (
        (
            "{q} [chips|lifts|floats] the ball over the top and {p} [volleys it|meets it on the "
            "volley] [beyond|past] {keeper}."
        ),
        ("[On the volley!|First time!] {p} [catches|strikes] {q}'s [cross|clearance] [sweetly|perfectly]."),
    ),
    "how_left": (
        (
            "{p} [curls|bends|guides] a left-footed shot [inside the far post|around {keeper}] "
            "from {q}'s [pass|lay-off]."
        ),
        (
            "[That famous left foot again|The left foot]: {p} [drives|strokes] it [low "
            "into|into] the corner, {q} with the assist."
        ),
    ),
    "how_freekick": (
        ("{p} [curls|lifts|bends] the free kick [over the wall|around the wall] and [in|past {keeper}]."),
        ("[Direct from the free kick|Straight in]! {p} [finds the top corner|leaves {keeper} rooted]."),
    ),
    "how_counter": (
        (
            "{team} [break at speed|spring forward|counter], {q} [releases|sets free] {p}, and "
            "{he} [rounds|slides it past|beats] {keeper}."
        ),
        (
            "From one end to the other: {q} [carries it sixty yards|wins it and runs], {p} "
            "[finishes the move|does the rest]."
        ),
    ),
    "how_pen": (
        (
            "{p} [converts|buries|tucks away] the penalty [after a handball|after {q} was "
            "brought down], sending {keeper} the wrong way."
        ),
        ("Penalty, after [a clumsy foul on {q}|a trip on {q}], and {p} [makes no mistake|scores from the spot]."),
    ),
    "how_own": (
        ("[Disaster for|Misery for] {p}, who [turns|deflects] a low cross from {q} into {his} own net."),
        (
            "Own goal! {q} [drives it across|fires it into the box] and {p} [can only help it "
            "past|slices it beyond] {his} own keeper."
        ),
    ),
    "now_opener": (
        "[It is|That makes it|The score:] {running}.",
        "{team} [lead|are in front|strike first]: {running}.",
    ),
    "now_level": (
        "[All square|Level again|Back to level terms]: {running}.",
        "{team} [are level|draw level|equalise], {running}.",
    ),
    "now_ahead": (
        "{team} [lead again|are back in front|edge ahead]: {running}.",
        "[Advantage {team}|The lead is theirs], {running}.",
    ),
    "now_double": (
        "[Daylight for {team}|A two-goal cushion|The lead is doubled]: {running}.",
        "{running}, and {team} [are in control|can breathe].",
    ),
    "now_stretch": (
        ("[This is turning into a rout|There is no way back now|It gets worse for {oshort}]: {running}."),
        "{running}. {onick} [look beaten|have no answer].",
    ),
    "now_close": (
        "{team} [pull one back|are back in it|halve the deficit]: {running}.",
        "[Game on|Hope for {team}]: {running}.",
    ),
    "now_console": (
        "[A consolation|Something to cheer] for {team}, {running}.",
        "{running}. {team} [still have a mountain to climb|need a miracle].",
    ),
    "tally2": (
        "[It is {his}|That is {his}] second [of the match|of the afternoon].",
        "{last} [has two|doubles {his} tally].",
    ),
    "tally3": (
        "[A hat-trick|The hat-trick is complete] for {last}!",
        "[Three goals for|Take a bow,] {last}[|!|, who takes the match ball].",
    ),
    "tally4": ("[Unbelievable|Incredible]: a fourth for {last}!",),
    "save": (
        ("{min}' {p} [shoots|tries {his} luck|aims for the corner] but {keeper} [saves|holds on|turns it away]."),
        ("{min}' [Fine save|Good stop|Strong hands] by {keeper} [from|to deny] {p}[| after {q}'s pass]."),
        "{min}' {q} [finds|picks out] {p}, {keeper} [blocks|gets down well|stands tall].",
        "{min}' {keeper} [tips|pushes] a [header|drive] from {p} [over|round the post].",
    ),
    "miss": (
        ("{min}' {p} [drags it wide|fires over|misses the target] [from a good position|from the edge of the box]."),
        "{min}' [Close!|Chance!] {q} [crosses|plays it through] and {p} [heads over|shoots wide].",
        "{min}' {p} [hits the post|strikes the bar]! [So near|How did that stay out] for {team}.",
        "{min}' [Hurried|Ambitious] effort from {p}, [well off target|high into the stand].",
    ),
    "corner": (
        ("{min}' Corner to {team}. {p} [swings it in|takes it short|delivers], but {onick} [clear|head it away]."),
        ("{min}' {p} [wins|earns] a corner for {nick}; [nothing comes of it|the header goes astray]."),
    ),
    "card": (
        ("{min}' Yellow card for {p} [after a late challenge on|for pulling back|for a foul on] {q}."),
        ("{min}' {p} [is booked|goes into the book|sees yellow] for [stopping|bringing down|clattering] {q}."),
    ),
    "red": (
        (
            "{min}' Red card! {p} [is sent off|must go|walks] for [a lunge at|a second yellow "
            "after a foul on|lashing out at] {q}. {team} [down to|are left with] ten."
        ),
    ),
    "sub": (
        "{min}' Change for {team}: {p} [on for|replaces] {q}.",
        "{min}' {boss} [sends on|brings on|turns to] {p} [for|in place of] {q}.",
        "{min}' [Fresh legs|Substitution] for {nick}, {p} [comes on for|replaces] {q}.",
    ),
    "half": (
        "45' Half-time: {running}.",
        "45' [The teams go in|That is the break|The whistle goes for half-time]: {running}.",
    ),
    "full": (
        "90' Full-time: {final}.",
        "90' [It is all over|The final whistle goes|That is that]: {final}.",
    ),
    "lead_draw": (
        "{homefull} and {awayfull} [drew|finished] {score} at {venue} [on {day}|in round {round}].",
        (
            "{awayfull} [took a point|came away with a {score} draw] from their visit to "
            "{homefull}: the final score was {final}."
        ),
        ("There was [no winner|nothing to choose] between {homenick} and {awaynick}, who drew {score}."),
    ),
    "lead_narrow": (
        ("{winfull} [edged out|squeezed past|narrowly beat] {losefull} {score} [on {day}|in the {league}|at {venue}]."),
        ("{win} [took the points|won {place}] with a [hard-fought|nervous|tight] {score} victory over {lose}."),
        "A single goal [was enough|decided it] as {winnick} beat {losenick} {score}.",
    ),
    "lead_easy": (
        "{winfull} [beat|saw off|overcame] {losefull} {score} at {venue}.",
        (
            "{winboss}'s {win} [won comfortably|deserved their {score} win|never looked back] "
            "[{place}|on {day}], beating {lose} {score}."
        ),
        "It finished {final} as {winnick} [had too much for|were a class above] {losenick}.",
    ),
    "lead_rout": (
        "{winfull} [thrashed|demolished|took apart] {losefull} {score} at {venue}.",
        ("{lose} [were humbled|suffered a heavy defeat], {score}, [at the hands of|by a rampant] {winfull}."),
        ("{winnick} [hit {wingoals}|scored {wingoals}] in a {score} [rout|demolition] of {losenick}."),
    ),
    "tell_opener": (
        "{p} [opened the scoring|broke the deadlock|struck first] {when}, <told_{kind}>.",
        ("{p}, {epi}, [opened the scoring|made the breakthrough|had the first word] {when}, <told_{kind}>."),
        "{team} [took the lead|went ahead] {when} when {p} [scored|struck], <told_{kind}>.",
        "The [opener|first goal] came {when}: {p}, <told_{kind}>.",
    ),
    "tell_level": (
        "{p} [equalised|levelled|drew {team} level] {when}, <told_{kind}>.",
        "{team} [hit back|replied] {when} through {p}, <told_{kind}>[|, to make it {tally}].",
    ),
    "tell_ahead": (
        ("{p} [restored the advantage|put {team} back in front|made it {tally}] {when}, <told_{kind}>."),
        "{team} [led again|regained the lead] {when}, {p} scoring, <told_{kind}>.",
    ),
    "tell_double": (
        "{p} [doubled the lead|made it {tally}|added another] {when}, <told_{kind}>.",
        "{when}[| it got better for {team}:] {p} [struck|scored] for {tally}, <told_{kind}>.",
    ),
    "tell_stretch": (
        "{p} [piled on the misery|added to the rout|made it {tally}] {when}, <told_{kind}>.",
        "{when} {p} [joined in|helped {himself}] to make it {tally}, <told_{kind}>.",
    ),
    "tell_close": (
        "{p} [pulled one back|reduced the arrears|gave {team} hope] {when}, <told_{kind}>.",
        "{team} [were back in it|narrowed the gap] {when} thanks to {p}, <told_{kind}>.",
    ),
    "tell_console": ("{p} [had a consolation|got a goal back] {when}, <told_{kind}>.",),
    "told_header": ("[heading in|meeting] a cross from {q}", "with a header from {q}'s [cross|corner]"),
    "told_long": (
        "[beating {keeper} from distance|with a shot from far out]",
        "with a fierce drive [teed up|set up] by {q}",
    ),
    "told_near": (
        "from close range [after good work by|served by] {q}",
        "[tapping in|turning in] {q}'s [cut-back|low ball]",
    ),
    "told_solo": (
        "after a [fine|mazy] run [that left {onick} standing|through the defence]",
        "going alone after a pass from {q}",
    ),
    "told_volley": ("volleying in [from {q}'s pass|a ball from {q}]",),
    "told_left": ("with {his} left foot [from {q}'s pass|after {q} laid it off]",),
    "told_freekick": (
        "[curling in|with] a free kick",
        "from a free kick [that {keeper} never saw|over the wall]",
    ),
    "told_counter": ("on the [break|counter-attack] [after|with] a pass from {q}",),
    "told_pen": ("from the [penalty spot|spot] after {q} was [fouled|tripped]",),
    "told_own": (
        ("{p} [turned|deflected|steered] a cross from {q} into {his} own net {when}, which made it {tally}."),
        "An own goal by {p} {when}, [under pressure from|from a ball by] {q}, made it {tally}.",
    ),
    "no_goals": (
        (
            "Neither side could find [a goal|a way through] and the keepers, {homekeeper} and "
            "{awaykeeper}, [had the last word|were rarely beaten for long]."
        ),
        "[Chances came and went|There were few clear chances], but it [stayed|remained] goalless.",
    ),
    "sent": (
        "{p} of {team} was sent off {when}.",
        "{team} [finished with|were reduced to] ten after {p} saw red {when}.",
    ),
    "interval": (
        "At half-time it [was|stood at] {running}.",
        "The [half-time score was|sides went in at] {running}.",
    ),
}
