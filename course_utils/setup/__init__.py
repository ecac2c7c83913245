"""From a clone to a lesson: the environment, JupyterLab, the doctor, the tests."""
