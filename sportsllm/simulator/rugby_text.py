"""Templates of rugby union. Slots: p the main player, q the other one, min the minute."""

RUGBY: dict[str, tuple[str, ...]] = {
    "kickoff": (
        "1' {homekicker} [kicks off|hoists the first ball|gets us going] for {home}.",
        ("1' [Up goes the ball|We are under way] at {venue}, {awaykicker} [with the kick-off|starting it] for {away}."),
    ),
    "try": ("{min}' [Try!|TRY!] <how_{kind}> [It is|That makes it|The score is now] {running}.",),
    "how_maul": (
        (
            "[The maul rumbles over|A driving maul from the lineout] and {p} [is at the bottom "
            "of it|grounds the ball|emerges with the score]."
        ),
        ("{q} [takes the lineout|wins it cleanly], {team} drive and {p} [crashes over|touches down]."),
    ),
    "how_wide": (
        ("{q} [throws a long pass|fixes the last man] and {p} [goes over in the corner|scores out wide|dives in]."),
        ("[Quick hands|The ball flies through the backs], {q} to {p}, who [has the legs|beats the cover] to the line."),
    ),
    "how_break": (
        (
            "{p} [slices|bursts|glides] through [a gap|the {oshort} midfield] and [runs in under "
            "the posts|cannot be caught]."
        ),
        (
            "[A dummy|A sidestep] from {p} [leaves {onick} grasping|opens the field] after {q}'s "
            "offload, and {he} [scores|crosses]."
        ),
    ),
    "how_power": (
        (
            "{p} [burrows|drives|smashes] over from [close range|two metres] after [wave upon "
            "wave|phase upon phase|a long siege]."
        ),
        "[Pick and go|Too strong]: {p} [carries two men over|forces {his} way over the line].",
    ),
    "how_kick": (
        ("{q} [chips ahead|puts a grubber through] and {p} [wins the race|gathers] to [score|touch down]."),
        (
            "[A cross-kick|A high ball] from {q} [drops into the arms of|is caught by] {p}, who "
            "[falls over the line|scores]."
        ),
    ),
    "conversion": (
        "{p} [adds|lands|slots] the conversion: {running}.",
        "{p} [converts|makes no mistake], {running}.",
    ),
    "wide": (
        "{p} [misses|pulls wide|hits the post with] the conversion.",
        "The conversion [drifts wide|falls short] from {p}.",
    ),
    "penalty": (
        ("{min}' Penalty {team}, and {p} [kicks three points|slots it|bisects the posts]. {running}."),
        (
            "{min}' [Offside|Hands in the ruck|A collapsed scrum] by {onick}: {p} [punishes "
            "them|takes the three], {running}."
        ),
    ),
    "drop": (
        (
            "{min}' [Drop goal!|Out of nothing], {p} [sits back in the pocket|lets fly] and [it "
            "sails over|the ball clears the bar]. {running}."
        ),
    ),
    "missed": (
        "{min}' {p} [misses|pushes|hooks] a penalty [wide|to the left|to the right].",
        "{min}' [No good|Short]: {p}'s penalty [falls under the bar|drifts past the post].",
    ),
    "scrum": (
        (
            "{min}' [Scrum|Put-in] to {team} after {p} [knocks on|spills the ball] [under "
            "pressure from|in the tackle of] {q}."
        ),
        (
            "{min}' {q} [wins the turnover|steals the ball] [at the breakdown|from {p}], [a "
            "relief for {onick}|and the danger passes]."
        ),
    ),
    "sinbin": (
        (
            "{min}' Yellow card: {p} [goes to the bin|sits out ten minutes] for [a high tackle "
            "on|a late hit on|taking out] {q}."
        ),
    ),
    "half": ("40' Half-time: {running}.", "40' [The hooter|The whistle] for the break: {running}."),
    "full": ("80' Full-time: {final}.", "80' [Kicked into touch|That is it|All over]: {final}."),
    "lead_draw": ("{homefull} and {awayfull} drew {score} at {venue}.",),
    "lead_narrow": (
        "{winfull} [edged|ground out a win over|pipped] {losefull} {score} [at {venue}|on {day}].",
        "[The gap was only {gap} as|It came down to {gap} as] {winnick} beat {losenick} {score}.",
    ),
    "lead_easy": (
        "{winfull} [beat|got the better of|overpowered] {losefull} {score} at {venue}.",
        ("{winboss}'s {win} [pulled away|took command] to win {score} [{place}|in the {league}] against {lose}."),
    ),
    "lead_rout": (
        "{winfull} [ran over|crushed|put to the sword] {losefull}, {score}, at {venue}.",
        "{losenick} [had no answer|were overrun] as {winfull} won {score}.",
    ),
    "tell_try": (
        ("{p} [scored|crossed|went over] for {team} {when}, [with the score|leaving it] at {running}."),
        ("{when} {p} [touched down|claimed a try] [after work by|with help from] {q} to make it {running}."),
        "{team} [had a try|struck] {when} through {p}: {running}.",
    ),
    "tell_kicks": (
        "{p} [kicked|landed|contributed] {count} for {team}.",
        "From the tee {p} [gave|earned] {team} {count}.",
    ),
    "interval": ("At the break it [was|stood at] {running}.", "Half-time [came at|brought] {running}."),
    "bonus": (
        "{team} [took|earned] a bonus point for {tries}.",
        "With {tries} {team} [collected|banked] the bonus point.",
    ),
    "losing": ("{lose} [left with|took home|could console themselves with] a losing bonus point.",),
    "no_tries": ("[There was no try|No side crossed the line] and [the boots decided it|the kickers ruled].",),
}
