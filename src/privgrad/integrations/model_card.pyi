from privgrad.statement.model_card import *
