#include "device_language.h"
