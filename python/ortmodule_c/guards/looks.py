"""How code of the user's looks at things, as far as that is written in it."""

import dis
import functools
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from types import CodeType
from typing import Any

_GLOBAL = {"LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL", "DELETE_GLOBAL", "STORE_NAME"}
BY_NAME = frozenset({"getattr", "hasattr"})
_CHECKS = frozenset({"isinstance", "issubclass"})
_IDENTITY = frozenset({"id", "is_", "is_not"})
_LOOKUPS = frozenset({*BY_NAME, "vars", "dir"})
# Ways around the lookups that are watched.
_HIDDEN = frozenset(
    {
        *("__getattribute__", "getattr_static", "getmembers", "import_module", "__import__", "__subclasses__"),
        *("__globals__", "__builtins__", "__closure__", "cell_contents", "__defaults__", "__kwdefaults__"),
        *("attrgetter", "methodcaller", "Formatter", "f_globals", "f_locals", "f_builtins", "f_back", "gi_frame"),
    }
)
# Ways around a lookup of the user's own.
RAW = frozenset({"__getattribute__", "__getstate__", "__reduce__", "__reduce_ex__", "__get__"})
_OF_TORCH = frozenset({"Tensor", "Parameter"})
_SYMBOLS = frozenset({"SymInt", "SymFloat", "SymBool"})
_OF_SYMBOLS = frozenset({"node", "__dict__"})  # attributes that numbers do not have
_ABSENT = ("POP_JUMP_FORWARD_IF_NONE", "POP_JUMP_IF_NONE")
# What a lookup may consist of that only picks a name: a letter for each.
_LETTERS: dict[Any, str] = {
    **{("LOAD_GLOBAL", "super"): "S", ("LOAD_GLOBAL", "object"): "O", ("LOAD_DEREF", "__class__"): "D"},
    **{(f"LOAD_{kind}", "__getattribute__"): "G" for kind in ("METHOD", "ATTR", "SUPER_ATTR", "SUPER_METHOD")},
    **{("CALL", n): str(n) for n in range(3)},
    **{"BINARY_SUBSCR": "i", "CONTAINS_OP": "e", "COMPARE_OP": "q", "RETURN_VALUE": "r"},
    **{("LOAD_METHOD", "get"): "g", ("LOAD_ATTR", "get"): "g", **dict.fromkeys(_ABSENT, "n")},
    **{f"POP_JUMP_{way}IF_{truth}": "j" for way in ("", "FORWARD_") for truth in ("TRUE", "FALSE")},
}
_SILENT = frozenset({"CACHE", "PUSH_NULL", "PRECALL", "RESUME", "COPY_FREE_VARS", "NOP", "TO_BOOL"})
_TAKES_MORE = inspect.CO_VARARGS | inspect.CO_VARKEYWORDS
_LOOK_UP = "(?:S0G|SDsG|OGs)"
_PICKS = re.compile("(?:kcqj|kdej|[kc]=|dki=|r)*")
_STRAIGHT = ("LOAD", "FORMAT", "BUILD", "CALL", "PRECALL", "KW_NAMES", "PUSH", "BINARY", "COPY", "SWAP")


@dataclass(frozen=True)
class Looks:
    """What is known of a code object.

    Attributes
    ----------
    names
        All that it can look up by a name that is written in it.
    scope
        Those that it looks up in its globals.
    asked
        Attributes of which it may ask whether they are there.
    names_are_constant
        Whether those that it gives to `getattr` and `hasattr` are written in it.
    whole_self
        Whether it takes all attributes of `self`.
    compared
        What it asks other things to be: a variable from outside and names of attributes; nothing for what is no such.
    paired
        The parameters of which it asks whether they are one, and those alone that it compares with other things.
    fixed
        The parameters that it never sets.
    takes_identity
        Whether it may ask for the identity of things by other means.
    hidden
        What it calls to look past all lookups, or nothing.
    passes_by
        Whether it looks past the lookup of the object that it is a method of.
    raw
        Whether it may look past a lookup of the user's own.
    stored
        Attributes that it sets.
    tells_symbols
        Whether it may ask what no symbol can hide: the type of what may be a number, or if a number is another one.
    typed
        The parameters that it asks for their types.
    imports
        Modules that it imports: from how many packages up, and the name that is written there.
    """

    names: frozenset[str]
    scope: frozenset[str]
    asked: frozenset[str]
    names_are_constant: bool
    whole_self: bool
    compared: frozenset[tuple[str, ...]]
    paired: frozenset[tuple[str, ...]]
    fixed: frozenset[str]
    takes_identity: bool
    hidden: str
    passes_by: bool
    raw: bool
    stored: frozenset[str]
    tells_symbols: bool
    typed: frozenset[str]
    imports: frozenset[tuple[int, str]]


@functools.lru_cache(maxsize=4096)
def looks(code: CodeType) -> Looks:
    """Read a code object."""
    instructions = [i for i in dis.get_instructions(code) if i.opname not in ("PUSH_NULL", "CACHE")]
    # In tuples are those that a pattern asks for.
    written = [s for c in code.co_consts for s in (c if type(c) is tuple else (c,))]
    strings = {s for s in written if type(s) is str and s.isidentifier()}
    named = frozenset(code.co_names)
    loaded = [(i.opname, i.argval) for i in instructions]
    passes_by = named >= {"super", "__getattribute__"}
    hidden = next(iter(named & _HIDDEN - ({"__getattribute__"} if passes_by else set())), "")
    if code.co_name == "__getattribute__":  # instances of its class are held whole
        hidden = ""
    if named & _OF_TORCH and _asks_classes(instructions):
        hidden = hidden or "type"
    if any(i.opname == "MATCH_CLASS" and i.arg for i in instructions):
        hidden = hidden or "__match_args__"
    parameters = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    everything = list(dis.get_instructions(code))
    kinds = [i for second in map(_second_argument, _after(_CHECKS, everything)) for i in second]
    stored = {i.argval for i in instructions if i.opname.startswith(("STORE_", "DELETE_"))}
    fixed = frozenset(parameters) - stored
    typed, asks_types = _typed(instructions, fixed, {i.offset for i in kinds})
    compared, paired = _compared(instructions, code.co_cellvars, parameters, fixed)
    hidden = hidden or _given_away(instructions)
    names = [_text(second) for second in map(_second_argument, _after(BY_NAME, everything))]
    return Looks(
        named | strings,
        frozenset(i.argval for i in instructions if i.opname in _GLOBAL),
        frozenset(strings) if named & BY_NAME else frozenset(),
        bool(names) and None not in names,
        "__dict__" in named,
        compared,
        paired,
        fixed,
        bool(named & _IDENTITY),
        hidden,
        passes_by,
        bool(RAW & (named | strings) or "__dict__" in strings or ("LOAD_SUPER_ATTR", "__dict__") in loaded),
        frozenset(i.argval for i in instructions if i.opname == "STORE_ATTR"),
        bool(named & _SYMBOLS or (named & BY_NAME and strings & _OF_SYMBOLS)) or asks_types or _is_number(instructions),
        typed,
        frozenset(_imports(instructions)),
    )


def _imports(instructions: list[dis.Instruction]) -> Iterator[tuple[int, str]]:
    for level, i in zip(instructions, instructions[2:], strict=False):
        if i.opname == "IMPORT_NAME":
            yield level.argval, i.argval


@dataclass(frozen=True)
class Picks:
    """What a lookup of the user's picks a name by, to look that up in its object.

    Attributes
    ----------
    tables
        Attributes of the object that are taken to be dictionaries of names by names.
    names
        Those that are written in it.
    absent
        What is not in the dictionary of the object, or None: what it does else is not known.
    """

    tables: frozenset[str]
    names: frozenset[str]
    absent: frozenset[str]


@functools.lru_cache(maxsize=4096)
def picked(code: CodeType) -> Picks | None:
    """Read a lookup of the user's that changes nothing, and reads nothing but its object itself."""
    plain = code.co_name == "__getattribute__" and code.co_argcount == len(("self", "name"))
    if not plain or code.co_kwonlyargcount or code.co_flags & _TAKES_MORE or code.co_exceptiontable:
        return None
    instructions = [i for i in dis.get_instructions(code) if i.opname not in _SILENT]
    owner, absent = code.co_varnames[0], set()
    text = "".join(_letter(i, owner) for i in instructions)
    if found := re.match(f"{_LOOK_UP}(c)[12]g(c)1(=)(k)n", text):
        whole, name, stored, asked = [instructions[found.start(n)].argval for n in range(1, 5)]
        if whole == "__dict__" and stored == asked:
            absent = {name}
            end = instructions[found.end() - 1].argval
            instructions = [i for i in instructions[found.end() :] if i.offset >= end]
            text = "".join(_letter(i, owner) for i in instructions)
    tables = {instructions[found.end() - 2].argval for found in re.finditer(f"{_LOOK_UP}c[12]", text)}
    text = re.sub(f"{_LOOK_UP}c[12]", "d", text)
    text = re.sub(f"{_LOOK_UP}(?:k|dki)[12]r", "r", text)
    names = {i.argval for i in instructions if i.opname == "LOAD_CONST"}
    return Picks(frozenset(tables), frozenset(names), frozenset(absent)) if _PICKS.fullmatch(text) else None


def _letter(i: dis.Instruction, owner: str) -> str:
    if i.opname.startswith("LOAD_FAST"):
        return "s" if i.argval == owner else "k" if type(i.argval) is str else "?"
    if i.opname == "LOAD_CONST":
        return "c" if type(i.argval) is str else "?"
    if i.opname == "STORE_FAST":
        return "?" if i.argval == owner else "="
    return _LETTERS.get((i.opname, i.argval), _LETTERS.get(i.opname, "?"))


def _typed(instructions: list[dis.Instruction], fixed: frozenset[str], kinds: set[int]) -> tuple[frozenset[str], bool]:
    """Those whose type it asks for, and whether it may ask for the type of anything else but to raise it.

    At the offsets `kinds` it asks only whether something is a type, which no number is.
    """
    typed = set()
    for at, instruction in enumerate(instructions):
        if instruction.opname in _GLOBAL and instruction.argval == "type" and instruction.offset not in kinds:
            then = instructions[at + 1 :]
            of_parameter = then[0].opname in ("LOAD_FAST", "LOAD_DEREF") and then[0].argval in fixed
            called = then[1].opname in ("PRECALL", "CALL") and then[1].arg == 1
            if of_parameter and called:
                typed.add(then[0].argval)
            elif next(i.opname for i in then if not i.opname.startswith(_STRAIGHT)) != "RAISE_VARARGS":
                return frozenset(), True
    return frozenset(typed), False


def _asks_classes(instructions: list[dis.Instruction]) -> bool:
    """Whether it may ask for the class of anything but `self`, as of a tensor, for which another stands in a trace."""
    for before, i, after in zip([None, *instructions], instructions, [*instructions[1:], None], strict=False):
        by_type = i.argval == "type" and i.opname in _GLOBAL
        owner = after if by_type else before if i.argval == "__class__" and i.opname == "LOAD_ATTR" else None
        if owner is not None and (owner.opname, owner.argval) != ("LOAD_FAST", "self"):
            return True
    return False


def _is_number(instructions: list[dis.Instruction]) -> bool:
    """Whether it asks if something is, not equals, a number that is written there."""
    numbers = {at for at, i in enumerate(instructions) if i.opname == "LOAD_CONST" and type(i.argval) in (int, float)}
    at_is = [at for at, i in enumerate(instructions) if i.opname == "IS_OP"]
    return any(numbers & {at - 1, at - 2} for at in at_is)


def _compared(
    instructions: list[dis.Instruction], cells: tuple[str, ...], parameters: tuple[str, ...], fixed: frozenset[str]
) -> tuple[frozenset[tuple[str, ...]], frozenset[tuple[str, ...]]]:
    """The right sides of `is`, without constants; apart from them the parameters that are sides of one."""
    compared, paired = set[tuple[str, ...]](), set[tuple[str, ...]]()
    chain: tuple[str, ...] | None = ()
    for at, instruction in enumerate(instructions):
        if instruction.opname == "IS_OP" and instruction.is_jump_target:  # one of several things
            compared.add(())
        elif instruction.opname == "IS_OP":
            sides = instructions[at - 2 : at]
            straight = not sides[1].is_jump_target
            if straight and all(i.opname == "LOAD_FAST" and i.argval in parameters for i in sides):
                paired.add(tuple(i.argval for i in sides))
            elif chain == () and (side := _parameter(sides, fixed)):
                paired.add((side,))
            elif chain is not None:
                compared.add(chain)
        elif instruction.opname == "LOAD_ATTR":
            chain = (*chain, instruction.argval) if chain else chain
        elif instruction.opname == "LOAD_CONST":
            chain = None
        else:
            outside = instruction.opname in (*_GLOBAL, "LOAD_DEREF") and instruction.argval not in cells
            chain = (instruction.argval,) if outside else ()
    return frozenset(compared), frozenset(paired)


def _parameter(sides: list[dis.Instruction], fixed: frozenset[str]) -> str:
    """The one of the two sides of `is` that is one of these parameters, whichever way was taken to there."""
    left, right = sides
    if right.opname == "LOAD_FAST" and right.argval in fixed:
        return str(right.argval)
    is_left = right.opname == "LOAD_FAST" and left.opname == "LOAD_FAST" and not right.is_jump_target
    return left.argval if is_left and left.argval in fixed else ""


def _given_away(instructions: list[dis.Instruction]) -> str:
    """What looks up names, or gives all, and is not called at once; nothing if there is no such thing."""
    before = None
    for i in instructions:
        if i.opname == "LOAD_GLOBAL" and i.argval in _LOOKUPS and not (i.arg or 0) & 1:
            return str(i.argval)
        if i.opname == "LOAD_ATTR" and i.argval == "__dict__" and before != "self":
            return "__dict__"
        before = i.argval
    return ""


def _after(names: frozenset[str], instructions: list[dis.Instruction]) -> Iterator[list[dis.Instruction]]:
    """What follows each instruction that loads one of these globals."""
    for at, i in enumerate(instructions):
        if i.argval in names and i.opname == "LOAD_GLOBAL":
            yield instructions[at + 1 :]


def _second_argument(instructions: list[dis.Instruction]) -> list[dis.Instruction]:
    """What makes the second argument of a call that follows, if that can be told."""
    ends: dict[int, int] = {}  # where the stack is as high as so many arguments for the last time
    depth = 0
    for at, i in enumerate(instructions):
        if i.opname in ("PRECALL", "CALL") and i.arg == depth and 1 in ends:
            return instructions[ends[1] : ends.get(2, ends[1])]
        if i.opcode in dis.hasjrel or i.opcode in dis.hasjabs or depth < 0:
            break
        depth += dis.stack_effect(i.opcode, i.arg)
        ends[depth] = at + 1
    return []


def _text(instructions: list[dis.Instruction]) -> str | None:
    """The text that they load, if it is written there."""
    found = [i.argval for i in instructions if i.opname == "LOAD_CONST" and type(i.argval) is str]
    return found[0] if len(instructions) == len(found) == 1 else None
