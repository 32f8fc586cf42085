"""The vocabulary of the generated tasks: short pools of words, disjoint where a task must tell them apart."""

ADJECTIVES = tuple(
    "amber azure big blue bold brave brown calm clean cold cool dark deep dim dry dull fair fast flat free "
    "fresh glad gold gray green happy hard heavy hot icy keen kind large late light little long loud low mild "
    "neat new odd old pale pink plain proud quick quiet rare red rich ripe rough round safe sharp shy".split()
)
NOUNS = tuple(
    "ant apple ball bank bean bear bell bird boat bone book box bread bridge brush cake camel car cat chair "
    "clock cloud coat corn cow cup deer desk dog door drum duck fan farm fish flag fox frog gate goat hat hen "
    "hill horse jar key kite lake lamp leaf lemon lion map mill moon mouse nest owl pen piano pig plum pond".split()
)
VERBS = tuple("finds sees likes keeps moves holds lifts wants paints sells needs meets".split())
NAMES = tuple(
    "ana ben carl dana emil fay gus hana ivan jane kate leo mia nora omar paul rosa sam tina uma vera wes yara zoe".split()
)
CAPITALS = (
    ("france", "paris"), ("italy", "rome"), ("spain", "madrid"), ("japan", "tokyo"), ("egypt", "cairo"),
    ("peru", "lima"), ("cuba", "havana"), ("kenya", "nairobi"), ("norway", "oslo"), ("china", "beijing"),
    ("greece", "athens"), ("germany", "berlin"), ("austria", "vienna"), ("poland", "warsaw"), ("russia", "moscow"),
    ("india", "delhi"),
)
CITIES = tuple(city for _, city in CAPITALS)
COUNTRIES = tuple(country for country, _ in CAPITALS)
COLORS = ("red", "blue", "green", "black", "white", "pink", "brown", "gray", "gold", "purple")
LETTERS = tuple("abcdefghijklmnopqrstuvwxyz")
ACTIONS = ("get", "set", "add", "find", "send", "open", "close", "start", "stop", "check", "book", "move")
OBJECTS = (
    "weather", "alarm", "room", "note", "light", "price", "flight", "order", "song", "file", "task", "door",
)
STRING_ARGUMENTS = ("city", "name", "color", "item")
INTEGER_ARGUMENTS = ("count", "days", "level", "size")
BOOLEAN_ARGUMENTS = ("urgent", "loud")
MARKS = ("over", "done", "sir", "bye", "stop", "yes")
TEMPLATE_WORDS = tuple(
    "what is the sum of compute please now work out plus minus times and larger smaller bigger number than which "
    "greater less yes no repeat copy these this items list words reverse order backwards write in give back sort "
    "from smallest to largest ascending descending down up how many are there count occurs find code for value "
    "look tell me here some notes note that remember my name live pet color hello ok your you who am i small "
    "reference model can do help hi capital answer with end every each start reply your as json keys schema "
    "use call tools tool result did say it was first then also next last between question type string integer "
    "boolean object properties number true false true years age city lives has a an at go item by again pick left".split()
)
