package state

import "strconv"

// FormatSize writes a number of bytes for people, as Kubernetes writes quantities: 1.5Gi.
func FormatSize(bytes int64) string {
	for i, unit := range []string{"Ei", "Pi", "Ti", "Gi", "Mi", "Ki"} {
		one := int64(1) << (60 - 10*i)
		switch {
		case bytes < one:
		case bytes%one == 0:
			return strconv.FormatInt(bytes/one, 10) + unit
		default:
			return strconv.FormatFloat(float64(bytes)/float64(one), 'f', 1, 64) + unit
		}
	}
	return strconv.FormatInt(bytes, 10)
}
