from privgrad.optim.filters import *
