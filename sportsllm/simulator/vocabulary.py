"""The names and word lists in `words/`: one class per kind of file, and every file, read once on import."""

from pathlib import Path

from sportsllm.simulator.toml_file import Model, read

_FOLDER = Path(__file__).parent / "words"
Words = tuple[str, ...]


class Shared(Model):
    """Words that every sport uses."""

    nicks: Words
    ground_starts: Words
    colours: Words
    second_colours: Words
    papers: Words
    days: Words
    numbers: Words
    ordinals: Words


class Region(Model):
    """Word parts of one region, and its climate: how often each kind of weather comes."""

    name: str
    men: Words
    women: Words
    roots: Words
    endings: Words
    town_starts: Words
    town_ends: Words
    climate: dict[str, int]


class _Regions(Model):
    regions: tuple[Region, ...]


class LeagueWords(Model):
    """One competition: how many clubs it has, and whether women play it."""

    name: str
    clubs: int
    women: bool


class ClubWords(Model):
    """Word lists for the clubs and players of one sport."""

    indoor: bool
    called_by_suffix: bool
    ground_size: float
    suffixes: Words
    before_town: Words
    grounds: Words
    traits: Words
    squad: tuple[tuple[str, float], ...]
    styles: dict[str, str]
    leagues: tuple[LeagueWords, ...]


class Races(Model):
    """Word lists for cycling races."""

    names: Words
    climbs: Words
    climb_endings: Words
    terrains: Words


class Tennis(Model):
    """Word lists for tennis tournaments, and the strengths of players."""

    tournaments: Words
    venues: Words
    surfaces: Words
    traits: dict[str, str]


SHARED = read(_FOLDER / "shared.toml", Shared)
REGIONS = read(_FOLDER / "regions.toml", _Regions).regions
CLUBS = {sport: read(_FOLDER / f"{sport}.toml", ClubWords) for sport in ("football", "basketball", "cycling")}
RACES = read(_FOLDER / "races.toml", Races)
TENNIS = read(_FOLDER / "tennis.toml", Tennis)
