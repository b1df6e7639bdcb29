from privgrad.perturb.augmentation import *
