"""The words, the sentences and the headings of a text, in every script."""

import re
import unicodedata
from bisect import bisect_right
from collections.abc import Iterator
from functools import lru_cache
from typing import TYPE_CHECKING

from ragspec.retrievers.formats.encodings import INVISIBLE

if TYPE_CHECKING:
    from ragspec.retrievers.search.documents import Document

PARAGRAPH_BREAK = re.compile(r"\n[ \t]*(?:\n[ \t]*)+")
STOPS = "。！？．｡।॥؟۔։።፧។။"  # no space needs to follow them
# Hebrew, Arabic, Georgian, Korean, Indic, Japanese and Chinese.
CASELESS = "\u05d0-\u06d3\u10d0-\u10ff\uac00-\ud7af\u0900-\u0dff\u3040-\u30ff\u3400-\u9fff"
# Closing quotes, marks of notes and of emphasis, which stand between a stop and the next sentence.
CLOSING = r"(?:[\"”“’')\]*_¹²³⁰-⁹†‡]|\[(?:\w{1,3}|\d[\d ,–-]+|[a-z]+ \w+)\]|\^\(?[\d,*†‡]+\)?)*+"
UPPER = "".join(filter(str.isupper, map(chr, range(0xC0, 0x2000))))
CAPITAL = f"A-Z0-9{CASELESS}{UPPER}"
# Abbreviations, ordinals and numbers of items: a sentence goes on after them, as after a short word
# of small letters behind a bracket, such as "(lit.". Small words may begin with a capital.
_ABBREVIATIONS = r"""Mr Mrs Ms Messrs dr prof profa St Ste Sta Lt Col Gen Capt Maj Adm Cpl Rev Hon
Rep Pres Bros Sgt Gov Sen Mt Ft Sr Sra Srta Dra Lic Sig Avv Amm Dir(?=\.\s[A-Z]\w\w+\.) Geom dott Hr
Fr Fa Ing Dipl Mme Mlle MM Nr Skt dhr mevr mgr drs inż [A-Z]\wDr Fig Univ vs cf e\.g i\.e [d]\.\sh
u\.\sa h\.\sc z\.T med kath ej [e]x ca approx vgl bzw evt evtl ggf inkl insb zzgl sog Mio Mrd EE av
ul np nap[rř] resp popř příp sv godz zob tzn bijv bl\.a f\.eks esim tj tzv tzw m\.in p\.es ad\ses
per\ses s[éè]c sécs (?:für|mit|von)\smax ул им акад проф обл пос пгт св дж див вул (?<!\d\s)см
(?<!и\s)т\.[екн] (?<!и\s)т\.\s[екн] (?<!\d\s)[гморс] \d\.\s\d \d\.\s\d\d डॉ पं श्री प्रो திரு"""
ABBREVIATIONS = [re.sub("^[a-zа-яś]", r"(?i:\g<0>)", each) for each in _ABBREVIATIONS.split()]
ARTICLES = "[Dd](?:er|ie|as|em|en|es)|[Vv]om|[Zz]u[mr]|bis", "[Ii]m|(?<!I )am"
ORDINALS = [rf"(?:{each})\s{digits}" for each in ARTICLES for digits in (r"\d", r"\d\d", "max")]
SMALL = rf"[^\W\d_A-Z{UPPER}]"
BEFORE = [rf"\b{each}" for each in (*ABBREVIATIONS, *ORDINALS)]
BEFORE += [r"^\d", r"^\d\d", r"^[A-Za-z]", r"[?!]\s[A-Z]", r"\s\s\d", r"\s\s\d\d", r"\d\s[adnv]"]
GOES_ON = "".join(rf"(?<!{each}\.)" for each in (*BEFORE, r"[\n*][*_]\w"))
GOES_ON += "".join(rf"(?!(?<=(?<!\S)[(\[]{SMALL}{{{n}}}\.)(?!\)))" for n in range(1, 7))
BEFORE_NUMBER = r"""no nos núm n[°º] p[aá]g p[aá]gs vol vols chap [ck]ap sec sect abs abschn art eq
eqs tab abb fig figs lit ziff anm t[eé]l fax ext apt aprox max min mind kl jan feb mar apr jun jul
aug sep sept o[ck]t nov de[cz] ver ed est al ref refs secs lem prop cor def рис табл [^\W\d_]"""
NUMBERED = "|".join(rf"(?<=\b{each}\.)" for each in BEFORE_NUMBER.split())
CONSONANTS = "b-df-hj-np-tv-xzčšžřłńśźżćçñđб-джзйк-нп-тф-щ"  # alone, as in "pp. 5", not "5 km."
BARE = rf"(?<!\d\s)(?<![^\s(])(?!Ltd)[{CONSONANTS}B-DF-HJ-NP-TV-Z][{CONSONANTS}]"
NUMBERED = "|".join((f"(?i:{NUMBERED})", *(rf"(?<={BARE}{{{count}}}\.)" for count in (1, 2, 3))))
# An initial ends a sentence only before a word that often begins one.
INITIAL = f"[A-HJ-Z{UPPER.replace('Ä', '')}\u05d0-\u06d3\u10d0-\u10ff]"
_FIRST_WORDS = """A After All Although And As At Because Before Both But By Each For From He How If
However In It Its Many Most No Not On Our She Since Some Such That The Their Then There These They
This Those To We What When While With You Aber Als Auch Bei Damit Dann Das Der Die Diese Dieses Dort
Ein Eine Er Es Für Im Mit Nach Sie Wenn Wir Elle Il Ils La W Nie Na Ale Po В Но На Он Она Они Это"""
BEGINS = rf"{CLOSING}\s+(?:{'|'.join(_FIRST_WORDS.split())})\s+(?!and\b|et\b|&)"
GOES_ON += rf"(?!(?:(?<=\b{INITIAL}\.)|(?<=\b[A-Z]\.\sI\.)|(?<=\bim\.))(?!{BEGINS}))"
GOES_ON += r"(?!(?<=\b[^\W\d_]\.)\s+[^\W\d_]\.)"  # z. B.
DOTTED = [rf"(?<=(?<![\w.]){SMALL}\.{rest}\.)" for rest in (SMALL, rf"{SMALL}\.{SMALL}")]
GOES_ON += rf"(?!(?:{'|'.join(DOTTED)})(?<![ap]\.m\.)(?<!т\.[дп]\.)(?!{BEGINS}))"  # e.g.
GOES_ON += r"(?!(?<=\b[ap]\.m\.)\s+(?:(?:[FMSW]|T[hu])[a-z]+day|[A-Z]{2,4})\b)"  # 9 a.m. Monday
MONTHS = "Januar|Februar|März|April|Mai|Juni|Juli|August|September|Oktober|November|Dezember"
DATE = rf"(?<=\d\.)\s+(?:\d\d?\.(?:\s|\d{{4}})|(?:{MONTHS}|Jahrhundert)\b)"  # 3. Mai, 3. 5. 2024
SENTENCE_BREAK = re.compile(
    rf"(?<=[.!?])(?={CLOSING}\s){GOES_ON}(?!{DATE})(?!(?:{NUMBERED})\s+[(\[]?(?:\d|[IVX]{{2,}}\b))"
    rf"{CLOSING}\s+(?=[\"“„«‘'(\[¿¡]?[*_]*[{CAPITAL}])"
    rf"|(?<=[{STOPS}])(?<!\d．)(?![^《「『（“》」』）”\n]{{1,99}}[》」』）”])"  # within brackets
    rf"[”’」』）]*(?![”’」』）{STOPS}]|(?<=[」』])と)"
    r"|\n(?=[ \t]*(?:[-*•–]|#{1,6}|(?:\d{1,3}|[a-z])[.)])[ \t]+\S"  # item, heading; row
    r"|[ \t]*\|[^\n]*\||[^\s:;][^\n\t]*\t\S|[^\n:;]{1,60}: [^\n;]*; [^\n:;]{1,60}: )",
    re.MULTILINE,
)
LINE_BREAK = re.compile(r"\n\s*")
# Thai, Lao, Burmese, Khmer, Japanese, Chinese and Korean: written without spaces between words.
SPACELESS = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af"
SPACELESS_LETTER = re.compile(f"[{SPACELESS}]")
CHINESE_LETTER = re.compile("[\u3400-\u9fff]")
INDIC = "\u0900-\u0963\u0966-\u0dff"  # with marks of vowels, parts of words that \w leaves out
LETTERS = re.compile(f"(?:[^\\W\\d_]|[{INDIC}])+")
# Words, identifiers, numbers, dates, versions, options, and names such as C++.
_WORD = f"(?:[^\\W_]++|[{INDIC}])++"
WORD = re.compile(_WORD)
TOKEN = re.compile(
    rf"{_WORD}(?:(?:_+|(?<=\d)[.,:/-](?=\d)){_WORD})*(?:\+\+|#)?|(?<![\w.;:!?)-])--[A-Za-z][\w-]*+"
)
GROUPED = re.compile(r"\d{1,3}(?:[.,]\d{3})+")  # 2,500 or 2.500
THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:[,'’\xa0\u2009\u202f]\d{3})+(?!\d|,\d)")  # 2,500.75kg
CONTROL = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")  # of terminals
VOICED = "\u3099\u309a"  # marks of kana, which are other letters without them
NASAL = re.compile("[ङञणनम]\u094d(?=[क-ह])")  # of Hindi, also spelled as the mark \u0902
_DIGITS = {n: str(unicodedata.digit(chr(n))) for n in range(0x660, 0x1C60) if chr(n).isdecimal()}
_LETTERS = dict(zip("ıłøđکیى", "ilodكيي", strict=True)) | {"ß": "ss", "æ": "ae", "œ": "oe", "ـ": ""}
PLAIN = str.maketrans(_LETTERS) | _DIGITS
SIGNS = str.maketrans(dict(zip("‐‑‒–—―−‘’ʼ“”„«»", '-------\'\'\'"""""', strict=True)))
# The article at the start of a sentence, but not "section A", and the ends of "it's" and "don't".
GRAMMAR = re.compile(r"A(?=\s[a-z])(?<!\wA)(?<![\w,;][ ]A)|['’](?<=\w.)[st]\b")
_STOP_WORDS = """a an and are as at be been but by can did do does for from had has have how i if in
into is it its of on or that the their there these this to was were what when where which who whom
whose why will with you your"""
STOP_WORDS = frozenset(_STOP_WORDS.split())
Span = tuple[int, int]
# Ends of words that are no plurals, of plurals and of their singulars; the first that fits counts.
_PLURALS = r"""([su]s|[st]is|(?<!t)axis|(?:^bi|ali|nv|tl)as|^(?:len|new|serie|specie)s)=\1
(wol|shel|^hal|^cal|loa|thie|scar)ves=\1f (^ind|vert|vort|^cod)ices?=\1ex (^kni|^wi|[ed]wi)ves=\1fe
(sh|zz)es=\1 (ss|ch|(?<!^a)x)es?=\1 (matr|append|^hel)ices?=\1ix (^child)ren=\1
((?:[mt]at|her|ech|vet|^g|rg|lcan|min|uit|ped|zer|ang)o|(?:^g|^bi|ali|nv|tl)as|^lens)es=\1
(^ax|cris|thes|nops|llips)es=\1is ([ao]lys|gnos)es?=\1is (mov|ook|zomb|calor)ies=\1ie
(?<=..)(?<![ae])ies=y
(^|^wo)men=\1man ((?:^b|ib|vir|[ct]at|amp|foc|on|ens|irc|hor|ct|in)us)es=\1 (?<=...)s="""
ENDINGS = ("s", "en", "ice", "che", "sse", "xe", "yse", "nose")
PLURALS = [(re.compile(f"{p}$"), s) for p, _, s in (e.rpartition("=") for e in _PLURALS.split())]


def words_of(text: str) -> list[str]:
    """Return the words of a text in plain letters, without stop words and plural endings.

    Scripts without spaces give pairs of neighbouring letters, and Chinese ones by themselves, too.
    Identifiers, dates, versions, options and names such as C++ come as a whole beside their parts.
    """
    text = text.lower() if text.isupper() and " " in text else text  # WHO? is a name
    text = GRAMMAR.sub(" ", CONTROL.sub(" ", text))
    if not text.isascii():
        text = NASAL.sub("\u0902", unicodedata.normalize("NFKC", INVISIBLE.sub("", text)))
        text = re.sub(f"[{SPACELESS}]+", r" \g<0> ", _without_marks(text))
    words = []
    for chunk in text.split():
        if chunk > "\u0e00" and SPACELESS_LETTER.match(chunk):
            words += [chunk[at : at + 2] for at in range(max(1, len(chunk) - 1))]
            words += CHINESE_LETTER.findall(chunk) if len(chunk) > 1 else []
        else:
            words += _words_in(chunk)
    return words


@lru_cache(1 << 16)
def _words_in(chunk: str) -> list[str]:
    """Return the words of a text without white space."""
    words = []
    for token in TOKEN.findall(plain_signs(chunk)):
        token = re.sub("[.,]", "", token) if GROUPED.fullmatch(token) else token
        parts = WORD.findall(token)
        # IT and WHO are names.
        content = (p for p in parts if p.lower() not in STOP_WORDS or (p.isupper() and p != "I"))
        words += [stem(_plain(part)) for part in content]
        words += [] if [token] == parts else [_plain(token)]
    return words


def plain_signs(text: str) -> str:
    """Return a text with plain dashes and quotes, and nothing between thousands of numbers."""
    return THOUSANDS.sub(lambda number: re.sub(r"\D", "", number[0]), text.translate(SIGNS))


def _plain(word: str) -> str:
    """Return a word in lower case, without accents, as most people spell it."""
    letters = unicodedata.normalize("NFD", word.lower().translate(PLAIN))
    return unicodedata.normalize("NFC", _without_marks(letters))


def _without_marks(text: str) -> str:
    for mark in () if text.isascii() else {*text} - {*VOICED}:
        if unicodedata.combining(mark):
            text = text.replace(mark, "")
    return text


def stem(word: str) -> str:
    """Return the singular of an English word (Harman's s-stemmer, 1991, with usual exceptions)."""
    for plural, singular in PLURALS if word.endswith(ENDINGS) else ():
        if plural.search(word):
            return plural.sub(singular, word)
    return word


def sentence_spans(text: str, start: int, end: int) -> Iterator[Span]:
    """Yield the spans of the sentences of text[start:end], which do not cross paragraphs."""
    for paragraph in chunks(text, (start, end), PARAGRAPH_BREAK):
        yield from chunks(text, paragraph, SENTENCE_BREAK)


def chunks(text: str, span: Span, break_at: re.Pattern[str]) -> Iterator[Span]:
    """Cut a span at a pattern; pieces are stripped of white space and never empty."""
    begin = span[0]
    # Closing quotes, which the pattern takes besides white space, stay with the piece.
    breaks = [(m.start() + len(m[0].rstrip()), m.end()) for m in break_at.finditer(text, *span)]
    for end, following in [*breaks, (span[1], span[1])]:
        piece = text[begin:end].lstrip()
        if size := len(piece.rstrip()):
            yield end - len(piece), end - len(piece) + size
        begin = following


def heading_of(document: "Document", offset: int) -> str:
    """Return the nearest heading above a character, the document's title without one."""
    number = bisect_right(document.headings, offset, key=lambda heading: heading[0])
    return document.headings[number - 1][1] if number else document.title
