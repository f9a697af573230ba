"""The verbs that train and judge predictors: the scripts of `predictors/`, which a wheel holds, too."""
