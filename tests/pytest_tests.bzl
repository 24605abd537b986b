"""pytest_tests: a test target for each *_test.py of a folder."""

load("//ffi:python.bzl", "pytest_test")

def pytest_tests(name, data = [], slow = [], tags = [], target_compatible_with = []):
    """Declares NAME for each NAME.py of the folder that ends in _test.py.

    Args:
      name: a tag of all targets.
      data: files that the tests read, beside the helpers in tests/.
      slow: names of targets that take minutes; they get the tag slow.
      tags: more tags of all targets.
      target_compatible_with: constraints of all targets.
    """
    for file in native.glob(["*_test.py"]):
        target = file.removesuffix(".py")
        pytest_test(
            name = target,
            timeout = "eternal",  # a limit against hanging, whatever the machine does besides
            src = file,
            data = ["//tests:helpers"] + data,
            package = "//:ddtree_jax",
            tags = [name] + tags + (["slow"] if target in slow else []),
            target_compatible_with = target_compatible_with,
        )
