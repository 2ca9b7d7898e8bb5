"""Templates of tennis. Slots: p the player of the sentence, o the opponent, games "
"the score in the set."""

TENNIS: dict[str, tuple[str, ...]] = {
    "title_open": (
        "{name}, {round}: {a} v {b}\n{venue}, {surface}",
        "{round} at the {name}: {a} against {b}",
        "{venue} - {name}, {round}. {a} meets {b} on {surface}.",
    ),
    "title_straight": (
        "{wlast} [breezes|sails] past {llast}",
        "{wlast} [too strong for|ends the hopes of] {llast} in {town}",
    ),
    "title_long": (
        "{wlast} [outlasts|survives] {llast}",
        "[Epic|Thriller] in {town}: {wlast} [beats|edges] {llast}",
    ),
    "byline": ("By {writer}, {paper}", "{writer} in {town} for the {paper}"),
    "preview": (
        "{a}, {aepi}, [faces|meets] {b}, {bepi}, in the {round} of the {name}. <hope>",
        (
            "[There is|We have] a [fine|promising] contrast at {venue}: {a} with {atrait} "
            "against {b} and {btrait}. <hope>"
        ),
    ),
    "hope": (
        "The {surface} should [suit|help] {alast}.",
        "[Much|A lot] depends on {blast}'s [first serve|patience|legs].",
        "The {next} is [the prize|what both are after].",
    ),
    "set": (
        "Set {n}, {p} [to serve first|serving first].",
        "Set {n}. {p} [serves|opens the serving].",
    ),
    "hold": (
        "{games} {p} [holds|holds serve] to {points}.",
        "{games} [Easy|Quick] game for {p}, to {points}.",
        "{games} {p} [serves it out|keeps serve], {o} on {points}.",
    ),
    "tight": (
        "{games} {p} [survives|holds] [after deuce|from break point down].",
        "{games} [A long game|Three deuces|Ten minutes], but {p} [holds|gets there].",
    ),
    "ace": ("{games} {p} [seals it|holds] with an ace.", "{games} [Ace!|Unreturnable.] {p} holds."),
    "break": (
        "{games} BREAK! {p} [takes {o}'s serve|breaks] with <shot>.",
        (
            "{games} [Break of serve|The serve is lost]: {o} [double-faults|nets a "
            "volley|falters], {p} [profits|moves on]."
        ),
        "{games} {p} [breaks|strikes], <shot> [doing the damage|on the line].",
    ),
    "shot": ("<shot_{trait}>",),
    "shot_serve": ("a [huge|blocked] return", "a [deep|fierce] return"),
    "shot_forehand": ("a [whipped|thunderous] forehand", "that forehand [down the line|inside out]"),
    "shot_backhand": ("a [one-handed|crosscourt] backhand", "a backhand [pass|winner]"),
    "shot_net": ("a [stop volley|drop volley]", "a [rush to the net|chip and charge]"),
    "shot_baseline": ("a [rally of thirty shots|long rally]", "[sheer patience|heavy topspin]"),
    "shot_slice": ("a [low slice|drop shot]", "a [wicked|floating] slice"),
    "setwon": ("[Game and set|Set], {p}: {games}. [In sets|Sets]: {sets}.",),
    "tiebreak": ("{games} {p} [takes|wins] the tie-break {points}.",),
    "match": ("[Game, set and match|That is the match], {p}: {result}.",),
    "lead_straight": (
        "{winner} [beat|defeated|saw off] {loser} {result} in the {round} of the {name}.",
        (
            "{winner}, {wepi}, [needed only {length}|was in no mood to linger and took {length}] "
            "to beat {loser} {result} at {venue}."
        ),
    ),
    "lead_long": (
        (
            "{winner} [outlasted|came through against|overcame] {loser} {result} [in "
            "{length}|after {length}] at the {name}."
        ),
        "It took {length}, but {winner}, {wepi}, [got past|beat] {loser} {result} in the {round}.",
    ),
    "tell_set": (
        "{p} [won|took|claimed] the {nth} set {games} [with {breaks}|thanks to {breaks}].",
        "The {nth} set [went to|belonged to] {p}, {games}, [after|with] {breaks}.",
    ),
    "tell_tiebreak": (
        "The {nth} set [needed|went to] a tie-break, which {p} won {points}.",
        "{p} [edged|took] the {nth} on a tie-break, {points}.",
    ),
    "weather_indoor": ("The roof was closed and [every sound carried|the ball flew].",),
    "weather_rain": ("Rain [delayed the start by an hour|sent them off once].",),
    "weather_wind": ("[Gusts|A swirling wind] [made every toss a gamble|played tricks with the lobs].",),
    "weather_clear": ("The [evening|afternoon] was [still and bright|perfect].",),
    "weather_heat": ("In the [heat|sun] [ice towels were out|both looked for shade].",),
    "weather_fog": ("A thin mist [hung|lay] over {venue}.",),
    "weather_cold": ("It was [cold enough for|a day for] long sleeves.",),
    "weather_snow": ("[Snow on the hills|A freezing breeze] [reminded all|told everyone] of winter.",),
    "quotes": (
        ('"[I trusted|Everything comes from] {wtrait}," said {wlast}. "[The rest is a bonus|Now I rest]."'),
        '{llast} [had no complaints|was gracious]: "[Too good today|{Whe} served better]."',
        (
            '"[I never found|I lost] my rhythm," [admitted|said] {llast}. {wlast} '
            '[smiled|shrugged]: "[On {surface} I feel at home|One match at a time]."'
        ),
    ),
    "next": ("{wlast} [goes on to|is into] the {next}.", "[Next for|Ahead of] {wlast}: the {next}."),
    "next_final": (
        "{wlast} [lifts|takes home] the trophy.",
        "The [title|trophy] [belongs to|goes to] {wlast}.",
    ),
}

TRAIT_WORDS = {
    "serve": "a huge serve",
    "forehand": "the forehand",
    "backhand": "the backhand",
    "net": "play at the net",
    "baseline": "patience from the baseline",
    "slice": "a teasing slice",
}
