package devices

import (
	"math"
	"regexp"
	"strconv"
)

// Thin volumes may have more bytes together than there is room: each counts for a claim, its
// size divided by its overcommit. An overcommit is in percent, from NoOvercommit, with which
// a volume counts in full, to MaxOvercommit.
const (
	NoOvercommit  = 100
	MaxOvercommit = 100 * 100
)

// OvercommitKey is the parameter of a StorageClass, and OvercommitValues says what it may be.
const (
	OvercommitKey    = "overcommit"
	OvercommitValues = "1 (default) to 100 with at most two decimals, for thin volumes"
)

var overcommitText = regexp.MustCompile(`^([0-9]{1,3})(?:\.([0-9]{1,2}))?$`)

// ParseOvercommit reads a parameter: 1 is NoOvercommit, 2.75 is 275 percent. ok is false if
// it is none of OvercommitValues.
func ParseOvercommit(text string) (percent int64, ok bool) {
	m := overcommitText.FindStringSubmatch(text)
	if m == nil {
		return 0, false
	}
	percent, _ = strconv.ParseInt(m[1]+(m[2] + "00")[:2], 10, 64) // three to five digits
	return percent, ValidOvercommit(percent)
}

// FormatOvercommit is the inverse of ParseOvercommit, in one spelling.
func FormatOvercommit(percent int64) string {
	return strconv.FormatFloat(float64(percent)/100, 'f', -1, 64)
}

// ValidOvercommit reports whether a volume can have such an overcommit.
func ValidOvercommit(percent int64) bool { return percent >= NoOvercommit && percent <= MaxOvercommit }

// Claim returns the bytes that a volume of that size counts for, rounded up.
func Claim(bytes, percent int64) int64 {
	hundreds, rest := bytes/percent, bytes%percent
	return hundreds*100 + (rest*100+percent-1)/percent
}

// RoomFor returns the bytes that volumes can have together whose claims are to fit into so
// many: the inverse of Claim.
func RoomFor(bytes, percent int64) int64 {
	hundreds, rest := bytes/100, bytes%100
	if hundreds >= math.MaxInt64/percent {
		return math.MaxInt64
	}
	return hundreds*percent + rest*percent/100
}
