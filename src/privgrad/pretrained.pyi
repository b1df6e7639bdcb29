from privgrad.features.pretrained import *
