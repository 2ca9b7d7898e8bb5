"""Invented people and places: ten regions, each with its own sound, so that a name "
"tells where it is from."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Region:
    """Word parts of one region, and its climate: how often each kind of weather comes."""

    name: str
    men: tuple[str, ...]
    women: tuple[str, ...]
    roots: tuple[str, ...]
    endings: tuple[str, ...]
    town_starts: tuple[str, ...]
    town_ends: tuple[str, ...]
    climate: dict[str, int]


def _region(
    name: str, men: str, women: str, roots: str, endings: str, starts: str, ends: str, **climate: int
) -> Region:
    men_, women_, roots_, endings_, starts_, ends_ = (
        tuple(text.split()) for text in (men, women, roots, endings, starts, ends)
    )
    return Region(name, men_, women_, roots_, endings_, starts_, ends_, climate)


REGIONS = (
    _region(
        "Norrland Coast",
        (
            "Torvik Eskil Hallur Runo Stellan Arvid Jorund Kettil Sivert Brage Ulvar Einor "
            "Skarde Vigge Asmund Torgil Leiv Odder"
        ),
        ("Solvi Ingra Tuva Eirika Marit Signe Yrsa Hedvi Alfhild Runa Stina Thyra Lovise Embla Gudny Ylva Ragna Synne"),
        (
            "Halv Stor Kvern Bjel Skog Torst Vind Aske Rund Lyng Fjeld Grim Ost Hegg Sund Nord "
            "Tyr Elg Ulv Bakk Strand Kro Vass Nyg"
        ),
        "sen vik gaard lund berg rud dal stad moe haug",
        "Skarn Hol Frost Vest Grun Tolv Elv Sild Myr Kall",
        "vik havn fjord stad nes berg",
        snow=4,
        rain=4,
        wind=3,
        clear=2,
        fog=1,
    ),
    _region(
        "Marlshire",
        (
            "Edmer Corwin Alder Tobin Wystan Harlan Osric Perrin Godwin Lorne Jasper Bram Fenton "
            "Rowan Silas Jory Ambrose Clem"
        ),
        (
            "Elspet Maudie Linnet Averil Bryony Hester Isolde Merrin Tamsel Odile Petra Wenna "
            "Sorrel Nerys Rosamund Ivy Clemence Effie"
        ),
        (
            "Thorn Ald Hask Brack Wex Fen Harr Mar Pell Quill Stan Wain Cold Ember Lang Rudd Had "
            "Crow Whit Ash Mer Pens Dun Tarn"
        ),
        "ley wick combe worth by stone brook field well croft",
        "Brindle Thistle Mallow Harrow Otter Copper Wether Lark Gander Bramble",
        "moor bridge ford mere gate combe",
        rain=5,
        wind=2,
        fog=3,
        clear=3,
    ),
    _region(
        "Vostrava",
        (
            "Milosh Dragan Jarek Tomir Bohdar Vesko Radim Zoran Kazmir Ludek Stanek Ivo Pavlo "
            "Goran Andrej Yarik Borko Luka"
        ),
        (
            "Vesna Jadra Milka Zorana Bozena Liduska Katja Renka Svetla Danica Tereza Olena "
            "Ludmira Halina Iskra Nadia Mirka Zlata"
        ),
        ("Kor Vran Zel Bar Mil Dob Stan Kuz Petr Hrad Jan Lub Mor Rak Sok Tep Brod Les Mlad Pol Vit Zim Hol Cern"),
        "ek ovic nik ovsky arov enko ic an uk insky",
        "Belka Novo Zla Kras Cerna Vysok Star Dubr Lip Hor",
        "grad vice ova nik ava polje",
        snow=3,
        clear=3,
        cold=4,
        rain=2,
    ),
    _region(
        "Costa Almera",
        (
            "Ramiro Teobaldo Nuno Celso Iago Fermin Adelmo Baltasar Elio Jacinto Lisandro Rufino "
            "Tiago Vidal Amancio Benito Donato Gonzalo"
        ),
        (
            "Ximena Araceli Brisa Nerea Lucinda Jimena Aldara Carmela Estela Inesa Noemi Pilara "
            "Rosaura Zaida Rocio Paloma Leire Candela"
        ),
        ("Alm Bar Cast Dur Esc Fer Gal Her Lam Mont Ner Pal Ques Rib Sal Val Cor Bel Mend Par Rom Sol Ter Yb"),
        "era adas ueiro onde illa ares ino eda osta anza",
        "Villa Punta Monte Rio Puerta Alta Campo Costa Fuente Mira",
        "lora doro sola vera nilla marina",
        heat=5,
        clear=5,
        wind=2,
        rain=1,
    ),
    _region(
        "Lombrese",
        (
            "Ettorio Dario Sandro Fulvio Marzio Nicolo Ottavio Renzo Silvano Tullio Ugo Valerio "
            "Bruno Cosimo Ezio Leandro Orfeo Primo"
        ),
        (
            "Fiamma Giada Luciana Mirella Ornella Perla Romola Serafina Tosca Viola Zelina Alba "
            "Bice Donata Elettra Ginevra Nives Ilaria"
        ),
        ("Bell Cor Fior Gran Lomb Mar Nav Ors Pell Rav Sant Tor Ver Zan Cal Bru Fal Gal Mir Pav Ros Sca Tav Vit"),
        "etti ani ucci ino ardo elli one esi occo igno",
        "Monte Castel Ponte San Borgo Val Torre Porto Rocca Campo",
        "rava sello lupo ranza fiore mento",
        heat=3,
        clear=5,
        fog=2,
        rain=2,
    ),
    _region(
        "Dakoro Plains",
        (
            "Kwabe Amadu Sekou Idris Jabaru Olumo Tendai Bakari Yaw Chike Mosi Femo Lamine "
            "Zuberi Kofu Thabo Ousman Lindo"
        ),
        ("Amara Nkiru Zola Adjoa Fatu Imani Sade Thandi Yemi Ayoka Bintu Dalia Efua Kesia Nala Chipo Awa Senami"),
        ("Ade Bala Coma Dia Eke Kone Mba Nwa Oba Sarr Tou Zon Ama Fofa Kama Oku Ndo Sisse Bem Cha Dje Ika Wele"),
        "ola re nde kwu ra fo dele mba yo tu",
        "Dako Bana Kuma Tomba Zari Obu Lago Nami Sekou Wara",
        "ra bo ville di kro ko",
        heat=6,
        rain=3,
        clear=4,
    ),
    _region(
        "Hanrei Islands",
        (
            "Haruto Jinso Kenta Ryoma Sotaro Taiga Yuzen Minho Daiko Genki Isamu Naoto Shunpei "
            "Takeo Renji Kaito Shoma Eiji"
        ),
        (
            "Aiko Emiri Hanae Kohana Misato Nozomi Rinka Sayuri Yumeka Chiyo Ayane Fumika Mirae "
            "Suzu Natsuki Yuina Mei Kaede"
        ),
        (
            "Aka Fuji Hira Ishi Kawa Mori Naka Oka Shima Taka Uchi Yama Kuro Mizu Hoshi Tani Ari "
            "Kita Matsu Nishi Sugi Toyo Waka Hase"
        ),
        "moto da mura zaki no hara ta gawa be numa",
        "Hama Kita Minami Ao Shiro Naga Tsuru Umi Toyo Haku",
        "saki tori hama shima ura kura",
        rain=4,
        clear=4,
        wind=2,
        heat=2,
    ),
    _region(
        "Altmark",
        (
            "Gerolf Dietmar Anselm Falko Henrik Jost Konrad Lothar Ruprecht Ulrik Volker Wendel "
            "Emmo Bastian Egon Matthis Joris Thilo"
        ),
        (
            "Annika Britta Gesine Heike Ilsa Klara Liesel Merte Renate Svenja Thea Ulrike Wilma "
            "Frieda Elke Sanne Greta Ronja"
        ),
        (
            "Acker Brand Dorn Eichen Falken Hagen Kessel Linden Mohr Reiter Stein Tann Vogel "
            "Weiss Roth Kling Berg Ebers Gold Hart Kron Loh Sander Wald"
        ),
        "mann bauer hoff feld stedt meier brecht ling haus burg",
        "Alten Grauen Linden Ober Rosen Schwan Tannen Kupfer Hirsch Neuen",
        "burg dorf feld hausen stein bach",
        cold=3,
        rain=3,
        clear=3,
        snow=2,
        fog=1,
    ),
    _region(
        "Sarandesh",
        (
            "Arjan Devan Ishaan Kiran Manek Nirav Pranav Rohan Samir Tarun Vikash Yash Harish "
            "Farid Aarav Gopan Jatin Naveen"
        ),
        (
            "Anjali Bhavna Charu Devika Esha Gauri Ishani Kavya Lalita Meera Nandini Priyal "
            "Rukmi Tara Aditi Sunita Vani Reshma"
        ),
        ("Chand Dev Gopal Har Jag Kal Mad Nar Prab Raj Sur Tri Vid Ram Bal Sen Bhat Gau Kesh Lok Man Pav Shiv Tej"),
        "ani wal esh kar appa an nath deo hari endra",
        "Sur Nila Raj Chand Deva Amar Gopal Hari Kesh Mani",
        "pur abad nagar ganj kot garh",
        heat=6,
        clear=3,
        rain=3,
        fog=1,
    ),
    _region(
        "Valmoire",
        (
            "Armand Bastien Cyprien Didier Etienne Fabrice Gaspard Honore Jules Loic Marcel Noel "
            "Pascal Remy Alaric Benoit Corentin Leonce"
        ),
        (
            "Adele Blanche Celine Delphine Elodie Flore Ghislaine Josette Lucette Manon Noelle "
            "Odette Solene Yvette Margaux Sabine Oriane Capucine"
        ),
        ("Beau Char Del Font Gran Laur Mont Nev Per Rous Sau Tour Val Vig Chev Mar Bris Cler Fab Gir Lam Mer Pon Ther"),
        "mont ier eau aud ard igny elle oux ain ette",
        "Saint-Al Beau Clair Font Mont Roque Val Haute Belle Pont",
        "vigny monde rive court mere val",
        clear=4,
        rain=3,
        wind=3,
        cold=1,
    ),
)
