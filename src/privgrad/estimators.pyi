from privgrad.heads.sklearn import *
