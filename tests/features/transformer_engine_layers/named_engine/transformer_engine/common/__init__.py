from . import recipe as recipe
