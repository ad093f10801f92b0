"""Draft trees and the operations on them."""
