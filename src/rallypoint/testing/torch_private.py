"""Private names of torch that this package uses, and the purpose of each."""

# What torch imports when an optimizer first steps: seconds, unless it is there already.
FIRST_STEP = "torch._dynamo"
