"""Watch: what a person sees of a run, during it and afterwards; all of it is read from the run's folder."""
