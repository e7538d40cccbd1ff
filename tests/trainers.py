"""What the code of a trainer process begins with."""

# Collections of garbage are a third of the CPU time of `import torch` and of an interpreter's end. What is imported here is never garbage, so
# a collection need not look at it.
IMPORTS = "import gc\ngc.disable()\nimport torch\nimport nebulaml as nm\ngc.freeze()\ngc.enable()\n"
