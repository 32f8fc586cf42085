"""The vocabulary of the generated tasks: short pools of words, disjoint where a task must tell them apart."""

ADJECTIVES: tuple[str, ...] = (
    *("amber", "azure", "big", "blue", "bold", "brave", "brown", "calm", "clean", "cold", "cool", "dark", "deep"),
    *("dim", "dry", "dull", "fair", "fast", "flat", "free", "fresh", "glad", "gold", "gray", "green", "happy"),
    *("hard", "heavy", "hot", "icy", "keen", "kind", "large", "late", "light", "little", "long", "loud", "low"),
    *("mild", "neat", "new", "odd", "old", "pale", "pink", "plain", "proud", "quick", "quiet", "rare", "red"),
    *("rich", "ripe", "rough", "round", "safe", "sharp", "shy"),
)
NOUNS: tuple[str, ...] = (
    *("ant", "apple", "ball", "bank", "bean", "bear", "bell", "bird", "boat", "bone", "book", "box", "bread"),
    *("bridge", "brush", "cake", "camel", "car", "cat", "chair", "clock", "cloud", "coat", "corn", "cow", "cup"),
    *("deer", "desk", "dog", "door", "drum", "duck", "fan", "farm", "fish", "flag", "fox", "frog", "gate", "goat"),
    *("hat", "hen", "hill", "horse", "jar", "key", "kite", "lake", "lamp", "leaf", "lemon", "lion", "map", "mill"),
    *("moon", "mouse", "nest", "owl", "pen", "piano", "pig", "plum", "pond"),
)
VERBS = ("finds", "sees", "likes", "keeps", "moves", "holds", "lifts", "wants", "paints", "sells", "needs", "meets")
NAMES: tuple[str, ...] = (
    *("ana", "ben", "carl", "dana", "emil", "fay", "gus", "hana", "ivan", "jane", "kate", "leo", "mia", "nora"),
    *("omar", "paul", "rosa", "sam", "tina", "uma", "vera", "wes", "yara", "zoe"),
)
CAPITALS = (
    ("france", "paris"),
    ("italy", "rome"),
    ("spain", "madrid"),
    ("japan", "tokyo"),
    ("egypt", "cairo"),
    ("peru", "lima"),
    ("cuba", "havana"),
    ("kenya", "nairobi"),
    ("norway", "oslo"),
    ("china", "beijing"),
    ("greece", "athens"),
    ("germany", "berlin"),
    ("austria", "vienna"),
    ("poland", "warsaw"),
    ("russia", "moscow"),
    ("india", "delhi"),
)
CITIES = tuple(city for _, city in CAPITALS)
COUNTRIES = tuple(country for country, _ in CAPITALS)
COLORS = ("red", "blue", "green", "black", "white", "pink", "brown", "gray", "gold", "purple")
LETTERS = tuple("abcdefghijklmnopqrstuvwxyz")
ACTIONS = ("get", "set", "add", "find", "send", "open", "close", "start", "stop", "check", "book", "move")
OBJECTS = ("weather", "alarm", "room", "note", "light", "price", "flight", "order", "song", "file", "task", "door")
STRING_ARGUMENTS = ("city", "name", "color", "item")
INTEGER_ARGUMENTS = ("count", "days", "level", "size")
BOOLEAN_ARGUMENTS = ("urgent", "loud")
MARKS = ("over", "done", "sir", "bye", "stop", "yes")
