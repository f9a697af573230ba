"""The predictors that a model gets at conversion, before any are trained for it."""
