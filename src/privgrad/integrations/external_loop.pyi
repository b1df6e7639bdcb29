from privgrad.training.external_loop import *
