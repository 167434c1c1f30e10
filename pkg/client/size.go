package client

import (
	"fmt"
	"math/big"
	"regexp"
)

var quantity = regexp.MustCompile(`^([0-9]{1,19}(?:\.[0-9]{1,19})?)([eE][0-9]{1,2})?([kMGTPE]|[KMGTPE]i)?$`)

var units = map[string]int64{
	"": 1, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18,
	"Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "Ti": 1 << 40, "Pi": 1 << 50, "Ei": 1 << 60,
}

// ParseSize reads a size in bytes as Kubernetes writes it: 1073741824, 1Gi,
// 1.5Gi, 500M, 1e9. It rounds up to whole bytes.
func ParseSize(text string) (int64, error) {
	m := quantity.FindStringSubmatch(text)
	if m == nil || m[2] != "" && m[3] != "" {
		return 0, fmt.Errorf("size %q: must be bytes, such as 1073741824, 500M or 1Gi", text)
	}
	n, ok := new(big.Rat).SetString(m[1] + m[2])
	if !ok {
		return 0, fmt.Errorf("size %q: must be bytes, such as 1073741824, 500M or 1Gi", text)
	}
	n.Mul(n, new(big.Rat).SetInt64(units[m[3]]))
	whole, rest := new(big.Int).QuoRem(n.Num(), n.Denom(), new(big.Int))
	if rest.Sign() > 0 {
		whole.Add(whole, big.NewInt(1))
	}
	if !whole.IsInt64() || whole.Sign() <= 0 {
		return 0, fmt.Errorf("size %q: must be between 1 byte and 8Ei", text)
	}
	return whole.Int64(), nil
}
