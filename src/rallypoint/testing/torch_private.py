"""Private torch names that this package uses, and the purpose of each."""

# torch imports this at an optimizer's first step, which takes seconds unless it is already loaded.
FIRST_STEP = "torch._dynamo"
