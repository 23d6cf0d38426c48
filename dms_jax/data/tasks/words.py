"""The word lists of the tasks: people, things, adjectives and nouns."""

# ruff: noqa: SIM905 - lists of words are read as text

NAMES = tuple(
    (
        "Ada Alan Amy Anna Ben Beth Bob Cara Carl Clara Dan Dora Ed Ella Emma Eric Eva Finn "
        "Fred Gina Greg Gus Hana Hugo Ida Ian Iris Jack Jane Jill Joe Kai Kate Ken Lars Lea "
        "Leo Lily Lucy Luke Mary Max Mia Mike Nina Noah Nora Omar Otto Paul Pia Rita Rosa Ruth "
        "Sam Sara Sven Ted Tina Tom Uma Vera Will Zoe "
    ).split()
)

THINGS = tuple(
    "apples balls books cards coins cups dolls eggs flags hats keys kites marbles nuts pens "
    "plums rings shells stamps stones".split()
)

ADJECTIVES = tuple(
    (
        "able amber ancient angry azure bitter bold brave breezy brief bright brisk broad "
        "bronze calm careful cheerful civic clean clever cloudy cold copper cosy crimson crisp "
        "curious curly daring dark deep dry dusty eager early earnest easy empty faint fair "
        "faithful famous fancy fast fierce final flat fluffy fond fragile frank free fresh "
        "frosty gentle giant glad golden grand grateful gray green grim handy happy hard hasty "
        "heavy helpful hidden hollow honest humble icy ideal idle jolly keen kind large late "
        "lazy light little lively lone long loud loyal lucky mellow merry mighty mild misty "
        "modern modest narrow neat nimble noble old open orange pale patient plain polite "
        "proud pure purple quaint quick quiet rapid rare ready rich ripe rough round royal "
        "rustic sandy scarlet secret sharp shiny short silent silver simple sleepy slow small "
        "smart smooth soft solid spare steady steep stern still stout strange strong sturdy "
        "sudden sunny sweet swift tall tame tender thick thin tidy tiny tough true upper vast "
        "velvet vivid warm wary weary wide wild wise witty young "
    ).split()
)

NOUNS = tuple(
    (
        "acorn anchor apron arrow attic badge bakery ballad banner barley barn basin basket "
        "beacon bell bench bishop blanket boot bottle boulder branch bread bridge broom bucket "
        "butter cabin candle canoe canvas canyon captain carpet carriage castle cedar cellar "
        "chapel cherry chest chimney church circle clay clock cloud coast cobbler comet "
        "compass copper corner cottage cradle crane creek crown curtain dagger daisy desert "
        "doctor dragon drawer drum eagle easel elbow ember engine falcon feather fence ferry "
        "fiddle field fire flower flute forest fountain fox gallery garden gate ginger glacier "
        "glove goose grain grape hammer harbor harp harvest hat hawk hazel hedge helmet heron "
        "hill honey horn horse house inn iron island ivory jacket jar jewel juniper kettle "
        "kitchen ladder lake lamp lantern lark laurel lemon letter library lily linen lion "
        "lock loom maple market meadow medal melon mill mirror monk moon moss mountain needle "
        "nest oak oar ocean olive orchard otter owl paddle palace paper parrot path pearl "
        "pebble pepper piano pillow pine pirate planet plough pocket pond poplar potter "
        "prairie quarry quilt rabbit raft raven ribbon river robin rocket rope rose saddle "
        "sailor salmon scarf shadow sheep shield ship shore shovel signal sparrow spider spoon "
        "stable star statue stove stream sugar table tailor temple thistle thread throne "
        "thunder tiger tower trail treasure trumpet tulip tunnel turtle valley violin wagon "
        "walnut water well whale wheat wheel whistle willow window winter wolf wool "
    ).split()
)
