"""What the code of a trainer process begins with."""

# The garbage collector takes a good part of the CPU time of `import torch` and of an interpreter's end. Imported objects are never garbage, so
# this code hides them from the collector. The interpreter then runs no __del__ of globals at its end: test_ends.py unfreezes all objects.
IMPORTS = "import gc\ngc.disable()\nimport torch\nimport nebulaml as nm\ngc.freeze()\ngc.enable()\n"
