from privgrad.perturb.local_training import *
