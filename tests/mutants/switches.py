"""Compiles mutants in together. The statements from a mutant's place to the end of its block stand there
twice, and the mutant's number chooses:

    if (phub_mutant_on(7)) { the rest of the block with the mutant } else { the rest of the block }

If the compiler refuses that, the block around is taken, and so on; a mutant that is not in a function's body, or
fits nowhere, is built alone."""
import re

HEADER = '#include "tests/mutants/mutant.h"\n'
NOISE = re.compile(r'//[^\n]*|/\*.*?\*/|R"(\w*)\(.*?\)\1"|"(?:\\.|[^"\\\n])*"'
                   r"|(?<![0-9a-fA-F])'(?:\\.|[^'\\\n])+'|^[ \t]*\#(?:\\\n|[^\n])*", re.DOTALL | re.MULTILINE)
# What may come before the brace of a block of statements.
BEFORE_BLOCK = re.compile(r"(?:[);}\]]|\)\s*&&?|\b(?:else|do|try|const|noexcept|override|final|mutable|HWY_ATTR)"
                          r"|->\s*[\w:<>&*, ]+)\s*$")
LABEL = re.compile(r"\b(?:case\b[^;{}?]*?[^:]|default\s*):(?!:)")
NO_STATEMENT = re.compile(r"\s*(?:else\b|while\b|catch\b|[-,;).+*/<>=?&|:\]]|$)")


def without_noise(text):
    """The text with spaces for comments, literals and directives."""
    return NOISE.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), text)


def changed_range(text, mutant):
    """Where it differs: begin and end in the text, and what stands there instead."""
    begin = text.index(mutant.old)
    old, new = mutant.old, mutant.new
    first = next((i for i, (a, b) in enumerate(zip(old, new)) if a != b), min(len(old), len(new)))
    rest_old, rest_new = old[first:][::-1], new[first:][::-1]
    last = next((i for i, (a, b) in enumerate(zip(rest_old, rest_new)) if a != b),
                min(len(rest_old), len(rest_new)))
    return begin + first, begin + len(old) - last, new[first:len(new) - last]


def enclosing_blocks(code, begin, end):
    """Begin and end of the insides of the blocks of statements around a range, the innermost first."""
    found, open_braces = [], []
    for brace in re.finditer(r"[{}]", code):
        at = brace.start()
        if brace[0] == "{":
            open_braces.append(at)
        elif open_braces:
            opened = open_braces.pop()
            if opened < begin and at >= end and BEFORE_BLOCK.search(code[max(0, opened - 80):opened]):
                found.append((opened + 1, at))
    return found


def rest_of_block(code, block, begin, end):
    """From the statement that has `begin` in it to the end of its block, or of its case of a switch."""
    first, last = block
    start, depth, at = first, 0, first
    while at < last:
        label = LABEL.match(code, at) if depth == 0 else None
        if label and label.end() <= begin:
            start = at = label.end()
            continue
        if label and at >= end:
            return start, at
        depth += (code[at] in "([{") - (code[at] in ")]}")
        at += 1
        if depth == 0 and at <= begin and code[at - 1] in ";}" and not NO_STATEMENT.match(code[at:at + 40]):
            start = at
    return start, last


def places(text, mutant):
    """The ranges that can be switched for it, the smallest first."""
    code = without_noise(text)
    begin, end, _ = changed_range(text, mutant)
    found = [rest_of_block(code, block, begin, end) for block in enclosing_blocks(code, begin, end)]
    return [place for at, place in enumerate(found) if place not in found[:at]]


def switched(text, chosen):
    """The text with the mutants of `chosen` in it ([(number, mutant, place)]), and the lines of each: for
    number, those of its branch and those of its place."""
    inserted = []
    for number, mutant, (start, stop) in chosen:
        begin, end, new = changed_range(text, mutant)
        branch = text[start:begin] + new + text[end:stop]
        inserted.append((start, 1, -stop, number, f"\nif (phub_mutant_on({number})) {{\n", f"{branch}\n}} else {{\n"))
        inserted.append((stop, 0, -start, number, "\n}\n", ""))
    parts, at, lines, spans = [HEADER], 0, 1, {}
    for position, _, _, number, head, branch in sorted(inserted):
        parts += [text[at:position], head, branch]
        lines += text.count("\n", at, position)
        at = position
        if branch:
            spans[number] = [lines + 1, lines + 1 + (head + branch).count("\n"), 0]
        else:
            spans[number][2] = lines + 2
        lines += (head + branch).count("\n")
    return "".join(parts) + text[at:], spans


def blamed(spans, line):
    """The mutants to which an error in a line is due: whose branch it is in, else whose place, else all."""
    in_branch = [number for number, (first, last, _) in spans.items() if first <= line <= last + 1]
    if in_branch:
        return [max(in_branch, key=lambda number: spans[number][0])]
    around = [number for number, (first, _, end) in spans.items() if first <= line <= end]
    return around or list(spans)
