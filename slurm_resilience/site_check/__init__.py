"""`sres check site`: look at everything that docs/install.md installs, in its order."""
