"""Ready estimators over the inference engine, with scikit-learn's manners; they need scikit-learn."""

from bayesgrad.models.glm import GLM

__all__ = ["GLM"]
