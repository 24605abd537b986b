"""The program of the process that renders chat templates: run as a script, never imported.

A line of JSON comes in, `{"source": template, "contexts": [variables, ...]}`; a line goes out,
`{"variables": [...], "words": [...], "texts": [...]}` or `{"error": why}`. It ends when its input
does. `template.py` starts it, gives its limits as arguments, and says why there is a process at all.
"""

import functools
import json
import resource
import signal
import sys

import jinja2
from jinja2 import meta, nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment


class _Failure(Exception):
    """A sentence about the template that needs no more words."""


def _limit(memory):
    """Binds this process for good: its memory in bytes, no core file, no writing to files."""
    limits = (
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, 0),
    )
    for kind, most in limits:
        _, hard = resource.getrlimit(kind)
        if hard != resource.RLIM_INFINITY:
            most = min(most, hard)
        resource.setrlimit(kind, (most, most))
    # Only the default action, the end, also stops an operation that never returns to the interpreter.
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF})


def _environment():
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    return environment


def _to_json(value, **options):
    # Jinja's own filter escapes for HTML, which would change the prompt.
    return json.dumps(value, **{"ensure_ascii": False, **options})


def _refuse(message):
    raise jinja2.TemplateError(message)


@functools.lru_cache(maxsize=4)
def _compile(source):
    """The template, the variables that it reads, and the words that it spells as strings or attributes."""
    environment = _environment()
    tree = environment.parse(source)
    words = {node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)}
    words |= {node.attr for node in tree.find_all(nodes.Getattr)}
    variables = meta.find_undeclared_variables(tree)
    return environment.from_string(source), sorted(variables), sorted(words)


def _render(template, context, most):
    pieces, length = [], 0
    for piece in template.generate(context):
        length += len(piece)
        if length > most:
            raise _Failure(f"it writes more than {most} characters")
        pieces.append(piece)
    return "".join(pieces)


def _why(error):
    """One line about `error`."""
    if isinstance(error, MemoryError):
        return "it takes too much memory"
    if isinstance(error, RecursionError):
        return "it nests too deeply"
    if isinstance(error, jinja2.TemplateSyntaxError):
        said = f"{error.message} (line {error.lineno})"
    else:
        said = str(error) or type(error).__name__
    line = "".join(c if c.isprintable() else " " for c in said[:1000])
    return " ".join(line.split())[:300]


def _answer(line, most):
    try:
        request = json.loads(line.decode("utf-8", "surrogatepass"))
        template, variables, words = _compile(request["source"])
        texts = [_render(template, context, most) for context in request["contexts"]]
        answer = {"variables": variables, "words": words, "texts": texts}
        return json.dumps(answer, ensure_ascii=False).encode("utf-8", "surrogatepass")
    except BaseException as error:  # a template may raise anything: that is its answer
        return json.dumps({"error": _why(error)}).encode()


def main(seconds, memory, most):
    """Answers until the input ends.

    Args:
      seconds: of the processor's time, for one answer.
      memory: bytes of address space.
      most: characters of one text.
    """
    _limit(memory)
    for line in sys.stdin.buffer:
        signal.setitimer(signal.ITIMER_PROF, seconds)
        answer = _answer(line, most)
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.buffer.write(answer + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
