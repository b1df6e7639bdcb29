from privgrad.training.distributed import *
