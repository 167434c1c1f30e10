// The test of the page in a browser: a module of its own, so that what drives the browser does not reach the product's
// go.mod.
module github.com/csi-node/csi-node/test/ui

go 1.26.7

require (
	github.com/chromedp/cdproto v0.159.0
	github.com/chromedp/chromedp v0.23.0
	github.com/csi-node/csi-node v0.0.0
)

require (
	github.com/go-json-experiment/json v0.0.0-20260820222146-c27c302e5fc3 // indirect
	golang.org/x/net v0.60.0 // indirect
)

replace github.com/csi-node/csi-node => ../..
