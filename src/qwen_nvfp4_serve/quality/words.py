"""Plain words that generated tasks are made of: short, so that they are cheap in any tokenizer."""

from __future__ import annotations

ADJECTIVES: tuple[str, ...] = (
    *("amber", "big", "blue", "bold", "brave", "brown", "calm", "clean", "cold", "cool", "dark", "deep", "dim", "dry"),
    *("dull", "fair", "fast", "flat", "fresh", "glad", "gold", "gray", "green", "happy", "hard", "heavy", "hot", "icy"),
    *("keen", "kind", "large", "late", "little", "long", "loud", "low", "mild", "neat", "new", "odd", "old", "pale"),
    *("pink", "plain", "proud", "quick", "quiet", "rare", "red", "rich", "ripe", "rough", "round", "safe", "sharp"),
)
NOUNS: tuple[str, ...] = (
    *("ant", "apple", "ball", "bank", "bean", "bear", "bell", "bird", "boat", "bone", "book", "box", "bread", "bridge"),
    *("brush", "cake", "camel", "car", "cat", "chair", "clock", "cloud", "coat", "corn", "cow", "cup", "deer", "desk"),
    *("dog", "door", "drum", "duck", "fan", "farm", "fish", "flag", "fox", "frog", "gate", "goat", "hat", "hen"),
    *("hill", "horse", "jar", "key", "kite", "lake", "lamp", "leaf", "lemon", "lion", "map", "mill", "moon", "mouse"),
    *("nest", "owl", "pen", "piano", "pig", "plum", "pond"),
)
VERBS = ("finds", "sees", "likes", "keeps", "moves", "holds", "lifts", "wants", "paints", "sells", "needs", "meets")
CITIES = ("paris", "rome", "madrid", "tokyo", "cairo", "lima", "oslo", "athens", "berlin", "vienna", "warsaw", "delhi")
COLORS = ("red", "blue", "green", "black", "white", "pink", "brown", "gray", "gold")
ACTIONS = ("get", "set", "add", "find", "send", "open", "close", "start", "stop", "check", "book", "move")
OBJECTS = ("weather", "alarm", "room", "note", "light", "price", "flight", "order", "song", "file", "task", "door")
