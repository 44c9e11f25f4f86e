"""Old MindSpeed import names and flags on top of the framework. Nothing else in the project imports this package."""
