"""What the code of a trainer process begins with."""

# Collections of garbage are a third of the CPU time of `import torch` and of an interpreter's end. What is imported here is never garbage, so
# a collection need not look at it. But then an interpreter's end runs no __del__ of globals: test_ends.py unfreezes all objects.
IMPORTS = "import gc\ngc.disable()\nimport torch\nimport nebulaml as nm\ngc.freeze()\ngc.enable()\n"
