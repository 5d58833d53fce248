"""``python -m narrowgate.train.recipe`` prints the reference of every key, as docs/recipes.md has it."""

from narrowgate.train.recipe.reference import reference

print(reference(), end="")
