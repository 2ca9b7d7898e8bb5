"""Templates that every sport between two clubs shares. Notation: see grammar.py."""

COMMON: dict[str, tuple[str, ...]] = {
    "byline": (
        "By {writer}, {paper}",
        "{writer} at {venue} for the {paper}",
        "From {writer} of the {paper}",
        "{paper} - {writer} reports",
    ),
    "title_open": (
        "{homefull} v {awayfull}\n{league}, round {round}, {venue}",
        "{league} round {round}: {homefull} v {awayfull}, {venue}",
        "{day} in the {league}: {homefull} host {awayfull} at {venue}",
        "{homefull} against {awayfull} ({league}, round {round})",
    ),
    "title_draw": (
        "{home} and {away} [share the points|cannot be separated|settle for a draw]",
        "[Honours even|Nothing between them|Stalemate] as {home} and {away} draw",
        "{awaynick} [hold|frustrate|take a point from] {homenick} at {venue}",
    ),
    "title_narrow": (
        "{win} [edge|squeeze|scrape] past {lose}",
        "{winnick} [hold on|hang on|dig in] to beat {lose}",
        "{lose} [fall just short|go down fighting|left with nothing] against {win}",
        "[Nervy|Narrow|Hard-earned] win for {winlast}'s {win}",
    ),
    "title_easy": (
        "{win} [too good for|see off|outclass] {lose}",
        "{winnick} [stroll|cruise|march] past {lose}",
        "{loselast}'s {lose} [well beaten|second best|swept aside] by {win}",
    ),
    "title_rout": (
        "{win} [run riot|show no mercy|hit top gear] against {lose}",
        "{winnick} [thrash|hammer|crush] {lose}",
        "[Misery|A day to forget|Humiliation] for {losenick} as {win} run riot",
    ),
    "preview": (
        (
            "{homefull} [welcome {awayfull} to|host {awayfull} at|receive {awayfull} at] {venue} "
            "on {day} in round {round} of the {league}. <pre_home>"
            " <pre_away>"
        ),
        (
            "[All eyes are|The spotlight is|Attention turns] on {venue}, where {homenick} "
            "[meet|face|take on] {awaynick}."
            " <pre_home> <pre_away>"
        ),
        "It is {day} in the {league} and {home} [face|meet|play] {away}. <pre_away> <pre_home>",
    ),
    "pre_home": (
        (
            "{home}, [founded|formed] in {homeyear}, [wear|play in] {homecolours} and [seat|have "
            "room for] {homeseats} at {venue}."
        ),
        "{homecaptain} [captains|leads out] {homenick}, whose ground [seats|holds] {homeseats}.",
        (
            "{homeboss} [has asked|has told|expects] {homenick} to [start fast|be patient|take "
            "no risks|play without fear]."
        ),
        "{home} [look to|rely on|build everything around] {homestar}[| once again|, as so often].",
        (
            "{homeboss} [likes|trusts|swears by] {homestyle}, and {home} [are seldom shaken out "
            "of it|know nothing else]."
        ),
        ("Few sides [enjoy|relish] coming to {venue}, and {homeboss} [wants|intends] to keep it that way."),
    ),
    "pre_away": (
        ("{away} [date from|go back to] {awayyear}, wear {awaycolours} and are [captained|led] by {awaycaptain}."),
        ("Captain {awaycaptain} [leads|brings] {awaynick}, [in|recognisable by their] {awaycolours}."),
        "{awayboss} [brings|sends out] a side [built on|known for|shaped by] {awaystyle}.",
        "{awaynick} [arrive|travel|come] with {awaystar} [leading the way|in form|fit again].",
        "{away} [have|put] their faith in {awaystyle} and in {awaystar}.",
        "For {awayboss} it is [a chance to silence the doubters|a long trip|a test of character].",
    ),
    "derby": (
        ("This is the derby, and [nobody in {region} needs reminding of it|form counts for nothing]."),
        "Neighbours and rivals: [no fixture|no date] means more to {homenick} than this one.",
        "The rivalry between {home} and {away} [is as old as the league|needs no introduction].",
    ),
    "weather_rain": (
        "Rain [fell steadily|swept across {venue}|had left the surface heavy].",
        ("It [was a wet day|had rained since morning] in {home} and the ball [skidded|would not behave]."),
    ),
    "weather_snow": (
        ("Snow [lay along the touchlines|had to be swept from the field] and {home} [shivered|was white]."),
        "[Flurries of snow|Thick flakes] [blew across|greeted both sides at] {venue}.",
    ),
    "weather_wind": (
        (
            "A [stiff|swirling|cold] wind blew [from end to end|across the field] and [high "
            "balls were a lottery|timing was everything]."
        ),
        "The wind [off the hills|from the sea] made life [hard|awkward] for both sides.",
    ),
    "weather_clear": (
        "Conditions [at {venue} were perfect|could not have been better].",
        "[A clear sky|Bright sunshine|A blue sky] [hung|shone] over {venue}.",
    ),
    "weather_fog": (
        ("Fog [hung over {venue}|rolled in from the river] and the far stand [was hard to see|disappeared from view]."),
        "[Mist|Fog] [delayed the start by ten minutes|thinned just in time].",
    ),
    "weather_heat": (
        "In [fierce|stifling|heavy] heat both sides [paced themselves|took every chance to drink].",
        "The [heat|sun] was [merciless|fierce] and {venue} [baked|shimmered].",
    ),
    "weather_cold": (
        "On a [bitter|freezing|raw] {day} breath [hung in the air|rose from both benches].",
        ("It was [bitterly cold|well below zero] in {home} and [gloves were everywhere|the crowd stamped its feet]."),
    ),
    "weather_indoor": (
        "The noise [under the roof of|inside] {venue} [never let up|was deafening].",
        "{venue} was [loud|packed|restless] [from the first minute|before the start].",
    ),
    "crowd": (
        "[A crowd of|An attendance of] {crowd} [watched|saw it|looked on].",
        "The attendance [was|was given as] {crowd}.",
        "{crowd} [were there to see it|came through the gates|paid to watch].",
    ),
    "full_house": (
        "{venue} was [full|sold out] with {crowd} inside.",
        "[Not a seat was empty|Every ticket was sold]: the attendance was {crowd}.",
    ),
    "quotes_draw": (
        (
            '"[A point is a point|We take the point|A fair result]," said {homeboss}. <bridge> '
            "{awayboss} [agreed|saw it the same"
            ' way]: "[Nobody deserved to lose|Both sides gave everything|We can live with that]."'
        ),
        (
            '{awayboss} was [the happier coach|content]: "[We came here to take something and we '
            'did|That is a good point]."'
        ),
        (
            '"[We should have won|Two points dropped|I am not satisfied]," '
            "[admitted|said|complained] {homeboss}[| afterwards]."
        ),
    ),
    "quotes_narrow": (
        (
            '"[We had to suffer|It was tighter than I like|We rode our luck]," [said|admitted] '
            '{winboss}. "<praise_win>."'
            " <bridge> <moan>"
        ),
        ('<moan> {winboss} [smiled|breathed out]: "[A win is a win|Nobody will ask how|My heart is still racing]."'),
        ("{winboss} [praised|thanked] {winnick} for [their patience|their nerve|staying calm]. <moan>"),
    ),
    "quotes_easy": (
        '"<praise_win>," said {winboss}[| with a smile]. <moan>',
        (
            '{winboss} was [delighted|pleased|satisfied]: "[We controlled it from start to '
            "finish|Our plan worked|That was us at"
            ' our best]." <bridge> <moan>'
        ),
        '<moan> {winboss} [had no such worries|could enjoy the evening]: "<praise_win>."',
    ),
    "quotes_rout": (
        (
            '"[Everything worked|I have seldom seen us play better|We could have had more]," '
            "[beamed|said] {winboss}. <shame>"
        ),
        ('<shame> {winboss} [tried not to gloat|stayed modest]: "[Tomorrow we work again|It is only one win]."'),
    ),
    "praise_win": (
        "[I am proud of every one of them|The players did what we trained|We wanted it more]",
        "[We stuck to {winstyle} and it paid|We believe in {winstyle}|Our way is {winstyle}]",
        "[The supporters carried us|They ran until they dropped]",
    ),
    "moan": (
        ("{loseboss} [was left to rue|pointed to|regretted] [missed chances|a slow start|small mistakes]."),
        '"[We beat ourselves|Small things decided it|We were not clever enough]," said {loseboss}.',
        "{loseboss} [refused to blame|stood by] {losenick}.",
        '"[The referee did not help|We deserved more]," [grumbled|insisted] {loseboss}.',
    ),
    "shame": (
        (
            '{loseboss} [apologised to|said sorry to] the travelling supporters: "[That was not '
            'good enough|We were awful]."'
        ),
        '"[I have no excuses|It hurts|We collapsed]," said [a shaken|a pale|an angry] {loseboss}.',
    ),
    "best": (
        ("{p}, {epi}, was [named player of the match|the pick of the players|the best on show] with {feat}."),
        "Player of the match: {p}[|, {epi}], with {feat} for {team}.",
        "The [award|prize] for the best player went to {p} of {team}, {epi}, for {feat}.",
    ),
    "captain": (
        (
            "{homecaptain}, [captain of {home}|the home captain], [shook every hand|led the lap "
            "of thanks] [afterwards|at the end]."
        ),
        ("Captains {homecaptain} and {awaycaptain} [embraced|swapped shirts] [at the end|afterwards]."),
    ),
    "bridge": ("[There was little to add.|It summed up the day.]", "[Few could disagree.|Nobody argued.]"),
    "next_win": (
        ("{win} [go into round {next}|look ahead to round {next}] in [good heart|high spirits|fine form]."),
        ("{winnick} can [dream|look up the table]; {losenick} must [regroup|look over their shoulder]."),
        "For {lose} [the questions grow louder|the wait goes on].",
    ),
    "next_draw": (
        "Both sides [move on|turn their thoughts] to round {next}.",
        "Neither {homenick} nor {awaynick} [gained|lost] much ground.",
    ),
}

STYLE_WORDS: dict[str, str] = {
    "pressing": "pressing high up the field",
    "counter": "quick counter-attacks",
    "possession": "patient possession",
    "direct": "long balls and second balls",
    "set pieces": "well-drilled set pieces",
    "forecheck": "a hard forecheck",
    "trap": "the neutral-zone trap",
    "rush": "speed off the rush",
    "cycle": "long cycles down low",
    "pace": "relentless pace",
    "defence": "stubborn defence",
    "threes": "shooting from deep",
    "inside": "strength under the basket",
    "forwards": "the power of the forwards",
    "backs": "width and quick hands",
    "kicking": "a shrewd kicking game",
    "tempo": "tempo and quick ball",
    "spin": "spin in the middle overs",
    "batting": "deep batting",
    "fielding": "sharp fielding",
}
