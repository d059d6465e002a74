"""Running text in eleven scripts, drawn from small vocabularies, with and without spaces between words."""

from __future__ import annotations

import numpy as np

# Script -> an alphabet, or words; what lies between words; what ends a sentence.
SCRIPTS: dict[str, tuple[str, str, str]] = {
    "latin": ("abcdefghijklmnoprstuvwxyzäéñ", " ", "."),
    "cyrillic": ("абвгдежзиклмнопрстуфхцчшыья", " ", "."),
    "greek": ("αβγδεζηθικλμνξοπρστυφχψω", " ", "."),
    "arabic": ("ابتثجحخدذرزسشصضطظعغفقكلمنهوي", " ", "."),
    "hebrew": ("אבגדהוזחטיכלמנסעפצקרשת", " ", "."),
    "devanagari": ("कखगघचछजटडतदनपबमयरलवसह", " ", "।"),
    "korean": ("가나다라마바사아자차카타파하고노도로모보소오조초", " ", "."),
    "chinese": ("的一是不了人我在有他这中大来上国个到说们为子和你地出道也时年得就那要下以生会自着去之过家学", "", "。"),
    "japanese": ("あいうえおかきくけこさしすせそたちつてとなにはのまもやをんアイウエオ日本語東京大学生人", "", "。"),
    "thai": ("กขคงจชซดตถทนบปผพมยรลวสหอะาเแโไ", "", " "),
    "khmer": ("កខគឃងចឆជញដឋឌណតថទធនបផពភមយរលវសហអ", "", "។"),
}
WITHOUT_SPACES = ("chinese", "japanese", "thai", "khmer")


def sentences(script: str, count: int, seed: int = 0) -> list[str]:
    """Sentences of 5 to 30 words of 1 to 4 characters, of a vocabulary of 200 words."""
    alphabet, space, end = SCRIPTS[script]
    random = np.random.default_rng([seed, *script.encode()])
    letters = np.array(list(alphabet))
    words = ["".join(random.choice(letters, random.integers(1, 5))) for _ in range(200)]
    return [space.join(random.choice(words, random.integers(5, 30))) + end for _ in range(count)]
