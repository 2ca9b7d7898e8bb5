"""Templates of ice hockey. Slots: p shooter, q passer, time the clock of the period."""

HOCKEY: dict[str, tuple[str, ...]] = {
    "face": (
        ("The puck [drops|is dropped] at {venue}, {homekeeper} in one goal and {awaykeeper} in the other."),
        (
            "[Face-off|We are off] at {venue}. {homekeeper} [guards|starts in] the home net, "
            "{awaykeeper} [the other|faces {home}]."
        ),
    ),
    "period": ("[Start of the {period} period|{Period} period|The {period} period begins].",),
    "end": (
        "End of the {period} period: {running}.",
        "[Horn|The horn sounds]. After the {period} period: {running}.",
    ),
    "full": ("[Final horn|It is over|That is the game]: {final}.",),
    "full_extra": ("[It is over|That is the game] in overtime: {final}.",),
    "extra": ("[Overtime|Extra time on the ice]: {running} after sixty minutes, next goal wins.",),
    "goal": ("{time} [Goal!|GOAL!|Score!] <how_{kind}>",),
    "how_slap": (
        (
            "{p} [unloads|winds up for] a slap shot from the [point|blue line] and [beats|blasts "
            "it past] {keeper}. Assist: {q}."
        ),
        ("[Bang!|A cannon of a shot]: {p} [one-times|hammers] {q}'s pass [high into the net|under the bar]."),
    ),
    "how_wrist": (
        ("{p} [snaps|flicks] a wrist shot over {keeper}'s [glove|shoulder] after {q}'s [drop pass|feed]."),
        "{q} [finds|sees] {p} in the slot, and {he} [picks the corner|goes top shelf].",
    ),
    "how_tip": (
        ("{q} [shoots from the point|fires] and {p} [deflects|tips] it [past|between the pads of] {keeper}."),
        "[Redirected!|A tip-in]: {p} [gets a stick to|changes the line of] {q}'s shot.",
    ),
    "how_back": (
        ("{p} [goes to {his} backhand|drags it round] and [lifts|slides] it past {keeper}, {q} with the pass."),
        ("[Lovely hands|Silky work] from {p}: backhand, [roof|far post]. {q} [sent {him} in|made the play]."),
    ),
    "how_rebound": (
        "{keeper} [stops|kicks out] {q}'s shot but {p} [buries|bangs in] the rebound.",
        "[Scramble|Traffic] in the crease and {p} [pokes in|swats home] what {q} [started|left].",
    ),
    "how_break": (
        ("{p} [is in alone|breaks away] after {q}'s [long pass|stretch pass] and [dekes|goes five-hole on] {keeper}."),
        ("[Breakaway!|Nobody back!] {q} [springs|frees] {p}, who [makes no mistake|beats {keeper} clean]."),
    ),
    "how_power": (
        (
            "[On the power play|With the man advantage], {q} [works it|slides it] across to {p} "
            "and it is [in|behind {keeper}]."
        ),
        ("The power play [pays|clicks]: {p} [from the circle|back-door], {q} with the [assist|feed]."),
    ),
    "now_opener": (
        "{running}, [first blood to|advantage] {nick}.",
        "{team} [lead|are on the board]: {running}.",
    ),
    "now_level": ("[Tied up|All square|Tie game]: {running}.", "{team} [tie it|answer], {running}."),
    "now_ahead": (
        "{team} [lead again|are in front once more], {running}.",
        "[Back in front|The lead is back]: {running}.",
    ),
    "now_double": (
        "{running}, and {nick} [skate clear|have breathing room].",
        "[Two up|Doubled]: {running}.",
    ),
    "now_stretch": (
        "[It is getting ugly|They keep coming]: {running}.",
        "{running}. {onick} [look lost|are chasing shadows].",
    ),
    "now_close": (
        "{team} [are within one|close the gap]: {running}.",
        "[One-goal game|Alive again]: {running}.",
    ),
    "now_console": ("{team} [get one back|are not giving up], {running}.",),
    "tally2": ("[Second of the night|That is two] for {last}.",),
    "tally3": ("[Hats rain down|Hat-trick|Caps on the ice] for {last}!",),
    "save": (
        "{time} {p} [shoots|lets it go], {keeper} [makes the pad save|gloves it|turns it aside].",
        "{time} [Big stop|What a save] by {keeper} [on|to rob] {p}.",
        "{time} {q} [feeds|spots] {p} [in front|in the slot] but {keeper} [smothers it|holds].",
    ),
    "hit": (
        "{time} {p} [lays out|crunches|flattens] {q} [along the boards|at centre ice].",
        "{time} [Heavy|Clean] check by {p} on {q}, and [{venue} roars|the glass shakes].",
    ),
    "penalty": (
        (
            "{time} Two minutes to {p} for [hooking|tripping|holding|slashing] {q}. {oshort} [on "
            "the power play|a skater up]."
        ),
        "{time} {p} [goes to the box|sits] for two minutes: [high-sticking|checking|boarding] {q}.",
    ),
    "lead_narrow": (
        ("{winfull} [edged|nipped|outlasted] {losefull} {score} [at {venue}|on {day}|in the {league}]."),
        "{winnick} [held off|squeaked past] {losenick} {score} [before|in front of] {crowd}.",
    ),
    "lead_overtime": (
        "{winfull} [needed overtime|had to work beyond sixty minutes] to beat {losefull} {score}.",
        ("[Sudden death|Overtime] [settled it|decided it] for {winnick}, {score} against {losenick}."),
    ),
    "lead_easy": (
        "{winfull} [beat|skated past|handled] {losefull} {score} at {venue}.",
        "{winboss}'s {win} [had too much speed for|were sharper than] {lose} and won {score}.",
    ),
    "lead_rout": (
        "{winfull} [buried|routed|blew away] {losefull} {score} at {venue}.",
        "{losenick} [were skated off the ice|had a night to forget], {score}, against {winfull}.",
    ),
    "tell_opener": (
        "{p} [opened the scoring|got the first] {when} <told_{kind}>.",
        "{team} [struck first|went ahead] {when}, {p} [scoring|finishing] <told_{kind}>.",
    ),
    "tell_level": (
        "{p} [tied it|levelled] {when} <told_{kind}>.",
        "{team} [answered|drew level] {when} through {p}, <told_{kind}>.",
    ),
    "tell_ahead": ("{p} [restored the lead|put {team} back in front] {when} <told_{kind}>.",),
    "tell_double": (
        "{p} [doubled the lead|made it {tally}] {when} <told_{kind}>.",
        "{when} {p} [added another|scored for {tally}] <told_{kind}>.",
    ),
    "tell_stretch": ("{p} [piled on|made it {tally}] {when} <told_{kind}>.",),
    "tell_close": ("{p} [brought {team} within one|pulled one back] {when} <told_{kind}>.",),
    "tell_console": ("{p} [got one back|scored] for {team} {when} <told_{kind}>.",),
    "tell_winner": (
        "{p} [won it|ended it|sent {nick} home happy] {when} <told_{kind}>.",
        "The winner [came|fell] {when}: {p}, <told_{kind}>.",
    ),
    "told_slap": ("with a slap shot [from|set up by] {q}", "blasting in {q}'s pass"),
    "told_wrist": ("with a wrist shot from {q}'s [feed|pass]",),
    "told_tip": ("[tipping in|deflecting] a shot by {q}",),
    "told_back": ("on the backhand from {q}'s pass",),
    "told_rebound": ("on the rebound of {q}'s shot",),
    "told_break": ("on a breakaway [sprung|started] by {q}",),
    "told_power": ("on the power play, [assisted|set up] by {q}",),
    "keepers": (
        "{homekeeper} [made|had] {homesaves} and {awaykeeper} [made|had] {awaysaves}.",
        "In the nets {homekeeper} [counted|made] {homesaves}, {awaykeeper} {awaysaves}.",
    ),
    "after": (
        "It was {running} after the {period} period.",
        "[After the {period} period|At the {period} break] it [stood at|was] {running}.",
    ),
}
