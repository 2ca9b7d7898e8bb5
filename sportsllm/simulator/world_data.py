"""Tables the world is built from: squads, traits, styles, names of clubs and grounds, and the leagues."""

# Roles of a squad in order, with the share of the scoring each one does.
SQUADS: dict[str, tuple[tuple[str, float], ...]] = {
    "football": (
        *(("goalkeeper", 0.0),),
        *(("defender", 1.0), ("full-back", 0.8), ("defender", 0.7), ("full-back", 0.5)),
        *(("midfielder", 2.5), ("playmaker", 3.0), ("midfielder", 1.5), ("midfielder", 1.0)),
        *(("winger", 5.0), ("striker", 12.0), ("forward", 7.0)),
        *(("winger", 3.0), ("striker", 4.0), ("midfielder", 1.0), ("defender", 0.3)),
    ),
    "hockey": (
        *(("goaltender", 0.0),),
        *(("defender", 2.0), ("defender", 1.2), ("defender", 0.8), ("defender", 0.5)),
        *(("centre", 9.0), ("left wing", 7.0), ("right wing", 6.0), ("centre", 4.0)),
        *(("left wing", 3.0), ("right wing", 2.5), ("centre", 1.5), ("winger", 1.0)),
    ),
    "basketball": (
        *(("point guard", 7.0), ("shooting guard", 9.0), ("small forward", 6.5)),
        *(("power forward", 5.5), ("centre", 5.0)),
        *(("sixth man", 3.5), ("reserve guard", 2.2), ("reserve forward", 1.8), ("backup centre", 1.2)),
    ),
    "rugby": (
        *(
            ("fly-half", 1.5),
            ("scrum-half", 2.0),
            ("full-back", 3.5),
            ("left wing", 6.5),
            ("right wing", 5.5),
        ),
        *(("outside centre", 3.0), ("inside centre", 2.0), ("number eight", 3.0), ("openside flanker", 2.5)),
        *(("blindside flanker", 1.5), ("hooker", 2.5), ("lock", 1.0), ("lock", 0.8), ("prop", 0.8)),
        *(("prop", 0.6),),
    ),
    "cycling": (
        *(("leader", 9.0), ("sprinter", 8.0), ("climber", 6.0), ("all-rounder", 4.0)),
        *(("rouleur", 2.5), ("domestique", 1.0)),
    ),
    "cricket": (
        *(("opener", 8.0), ("opener", 7.0), ("number three", 7.5), ("captain", 6.5), ("wicketkeeper", 5.5)),
        *(("all-rounder", 5.0), ("all-rounder", 4.0), ("off-spinner", 2.5), ("leg-spinner", 2.0)),
        *(("seamer", 1.5), ("fast bowler", 1.0)),
    ),
}
TRAITS: dict[str, tuple[str, ...]] = {
    "football": ("header", "long", "close", "solo", "volley", "left foot", "free kick"),
    "hockey": ("slap shot", "wrist shot", "deflection", "backhand", "rebound", "breakaway"),
    "basketball": ("three", "drive", "post", "jumper", "dunk"),
    "rugby": ("pace", "power", "footwork", "support"),
    "cycling": ("attack", "sprint", "climb", "time trial", "descent"),
    "tennis": ("serve", "forehand", "backhand", "net", "baseline", "slice"),
    "cricket": ("drive", "pull", "sweep", "cut", "loft"),
}
STYLES: dict[str, tuple[str, ...]] = {
    "football": ("pressing", "counter", "possession", "direct", "set pieces"),
    "hockey": ("forecheck", "trap", "rush", "cycle"),
    "basketball": ("pace", "defence", "threes", "inside"),
    "rugby": ("forwards", "backs", "kicking", "tempo"),
    "cycling": ("sprint train", "mountain", "breakaway"),
    "cricket": ("spin", "pace", "batting", "fielding"),
}
SUFFIXES: dict[str, tuple[str, ...]] = {
    "football": ("Rovers", "United", "Athletic", "Wanderers", "Albion", "Union", "Sporting", "Harriers"),
    "hockey": (
        "Blades",
        "Icehawks",
        "Narwhals",
        "Lynx",
        "Glaciers",
        "Mammoths",
        "Wolverines",
        "Ermines",
        "Reindeer",
        "Snowcats",
        "Icebreakers",
        "Walruses",
        "Huskies",
        "Orcas",
        "Yetis",
        "Sleighs",
    ),
    "basketball": (
        "Comets",
        "Towers",
        "Stags",
        "Pilots",
        "Cyclones",
        "Monarchs",
        "Lanterns",
        "Falcons",
        "Rockets",
        "Jaguars",
        "Sirens",
        "Thunderbirds",
        "Marlins",
        "Skylarks",
        "Titans",
        "Meteors",
    ),
    "rugby": ("RFC", "Old Boys", "Harriers RFC", "Nomads", "Ploughmen", "Ironsides", "Mariners", "Quarrymen"),
    "cycling": ("Velo", "Cycling", "Racing", "Wheelers", "Pro Team", "Chain Gang"),
    "cricket": ("Strikers", "Kestrels", "Royals XI", "Tigers XI", "Monsoon", "Cobras", "Sabres", "Kites"),
}
NICKS = (
    *("Herons", "Lanterns", "Millers", "Foxes", "Anchors", "Weavers", "Bells", "Otters"),
    *("Tanners", "Larks", "Hammers", "Badgers", "Potters", "Lions", "Ravens", "Shepherds"),
    *("Drummers", "Brewers", "Saddlers", "Owls", "Stallions", "Cranes", "Miners", "Gulls"),
    *("Masons", "Pikes", "Wasps", "Hornets", "Rams", "Beacons", "Boars", "Fishermen"),
    *("Knights", "Chandlers", "Storks", "Coopers", "Vipers", "Salamanders", "Tinkers", "Bulls"),
    *("Magpies", "Kingfishers", "Smiths", "Griffins", "Bears", "Eagles", "Swans", "Jackdaws"),
)
GROUNDS: dict[str, tuple[str, ...]] = {
    "football": ("Park", "Road", "Lane", "Meadow", "Stadium"),
    "hockey": ("Ice Hall", "Arena", "Rink", "Ice Palace"),
    "basketball": ("Gymnasium", "Dome", "Arena", "Court"),
    "rugby": ("Field", "Ground", "Park", "Green"),
    "cycling": ("Velodrome",),
    "cricket": ("Oval", "Green", "Cricket Ground", "Gardens"),
}
GROUND_STARTS = (
    *("Elm", "Mill", "Castle", "Station", "Cannon", "Orchard", "Harbour", "Abbey"),
    *("Quarry", "River", "Chapel", "Foundry", "Priory", "Windmill", "Market", "Cathedral"),
    *("Ferry", "Granary", "Lighthouse", "Tollgate", "Vineyard", "Brewery", "Clocktower", "Railway"),
    *("Shipyard", "Beacon", "Poplar", "Ropewalk", "Canal", "Juniper", "Lantern", "Saltworks"),
    *("Tramway", "Maple"),
)
COLOURS = (
    *("red", "blue", "green", "maroon", "orange", "purple", "turquoise", "yellow"),
    *("crimson", "navy"),
)
LEAGUES: dict[str, tuple[tuple[str, int, bool], ...]] = {  # name, clubs, women
    "football": (("Meridian League", 20, False), ("Crown League", 18, True), ("Northern Shield", 18, False)),
    "hockey": (("Polar League", 16, False), ("Aurora League", 14, True)),
    "basketball": (("Summit League", 16, False), ("Sapphire League", 14, True)),
    "rugby": (("Heritage Premiership", 16, False), ("Valley Trophy", 14, False)),
    "cycling": (("Continental Tour", 18, False),),
    "cricket": (("Sunset Twenty20", 14, False), ("Lotus Twenty20", 12, True)),
}
