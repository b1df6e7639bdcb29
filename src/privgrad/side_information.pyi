from privgrad.precondition.counts import *
